//! A desk with clients that ask, that stay silent, that ask for something else, and too many of them.

use std::os::unix::fs::PermissionsExt;

use super::*;

struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn scratch(name: &str) -> Scratch {
    let name = format!("landbridge-desk-{name}-{}", std::process::id());
    Scratch(std::env::temp_dir().join(name))
}

fn account() -> Account {
    Account {
        job: "0f".into(),
        launcher: 1,
        program: "./a \"b\"".into(),
        began: 2,
        recover: true,
        checkpoints: false,
        restarts: 3,
        ranks: Vec::new(),
        paths: None,
        record: None,
    }
}

fn roll(question: Question) -> Option<Account> {
    (question == Question::Roll).then(account)
}

/// A client that has said this, and what it has heard when the desk has been served.
fn ask(desk: &mut Desk, words: &[u8]) -> Vec<u8> {
    let mut client = UnixStream::connect(&desk.path).unwrap();
    client.write_all(words).unwrap();
    for _ in 0..3 {
        desk.serve(Instant::now(), roll);
    }
    client.set_nonblocking(true).unwrap();
    let mut heard = Vec::new();
    let _ = client.read_to_end(&mut heard);
    heard
}

#[test]
fn who_asks_is_answered_and_nothing_is_left() {
    let directory = scratch("asks");
    let mut desk = Desk::open(&directory.0, "job").unwrap();
    let heard = ask(&mut desk, Question::Roll.words().as_bytes());
    assert_eq!(serde_json::from_slice::<Account>(&heard).unwrap(), account());
    assert!(desk.clients.is_empty());
    assert_eq!(ask(&mut desk, b"rule 1\n"), b"");
    assert!(desk.clients.is_empty(), "whoever says something else is left at once");
    assert_eq!(ask(&mut desk, b"roll"), b"");
    desk.serve(Instant::now(), roll);
    assert_eq!(desk.clients.len(), 0, "it has gone");
    drop(desk);
    assert_eq!(std::fs::read_dir(&directory.0).unwrap().count(), 0);
}

#[test]
fn every_question_is_read_as_it_is_said_and_nothing_else_is_one() {
    let story = Question::Story { rank: u32::MAX, from: u64::MAX, count: u64::MAX };
    let [all, one] = [None, Some(u32::MAX)].map(|rank| Question::Checkpoint { rank });
    for question in [Question::Roll, Question::Paths, Question::Log, story, all, one] {
        let words = question.words();
        assert_eq!(Question::parse(words.as_bytes()), Some(question));
        let begins = |length: usize| Question::may_begin(&words.as_bytes()[..length]);
        assert!((0..words.len()).all(begins) && !begins(words.len()), "{words}");
    }
    for words in ["", "\n", "log\n", "story 1 2 3\n", "story 1 2 3 x\n", "log 1\n\n", "roll 2\n"] {
        assert_eq!(Question::parse(words.as_bytes()), None, "{words:?}");
    }
    assert!(!Question::may_begin(b"rule") && !Question::may_begin(&[b'1'; 100]));
}

#[test]
fn who_stays_silent_is_left_and_a_crowd_waits() {
    let directory = scratch("crowd");
    let mut desk = Desk::open(&directory.0, "job").unwrap();
    let connect = |_| UnixStream::connect(&desk.path).unwrap();
    let crowd: Vec<UnixStream> = (0..CLIENTS_MAX + 2).map(connect).collect();
    let now = Instant::now();
    desk.serve(now, roll);
    assert_eq!(desk.clients.len(), CLIENTS_MAX);
    assert_eq!(desk.descriptors().count(), CLIENTS_MAX, "the door is not looked at");
    assert_eq!(desk.next_time(), Some(now + CLIENT_TIME));
    desk.serve(now + CLIENT_TIME, roll);
    assert_eq!(desk.clients.len(), 0);
    desk.serve(now + CLIENT_TIME, roll);
    assert_eq!(desk.clients.len(), 2);
    drop(crowd);
}

#[test]
fn a_directory_that_others_can_open_is_not_used() {
    let directory = scratch("others");
    std::fs::create_dir(&directory.0).unwrap();
    std::fs::set_permissions(&directory.0, std::fs::Permissions::from_mode(0o755)).unwrap();
    let error = Desk::open(&directory.0, "job").err().unwrap();
    assert!(error.to_string().contains("only this user"), "{error}");
    std::fs::set_permissions(&directory.0, std::fs::Permissions::from_mode(0o700)).unwrap();
    let link = scratch("link");
    std::os::unix::fs::symlink(&directory.0, &link.0).unwrap();
    assert!(Desk::open(&link.0, "job").is_err());
    std::fs::remove_file(&link.0).unwrap();
    assert!(Desk::open(&directory.0, "job").is_ok());
}

#[test]
fn who_asks_for_what_takes_a_while_is_answered_when_it_is_known() {
    let directory = scratch("while");
    let mut desk = Desk::open(&directory.0, "job").unwrap();
    assert_eq!(ask(&mut desk, Question::Paths.words().as_bytes()), b"", "it is not known");
    desk.serve(Instant::now(), roll);
    assert_eq!(desk.clients.len(), 0, "who has asked has gone");
    let mut client = UnixStream::connect(&desk.path).unwrap();
    client.write_all(Question::Paths.words().as_bytes()).unwrap();
    desk.serve(Instant::now(), roll);
    assert_eq!(desk.clients.len(), 1);
    desk.serve(Instant::now(), |_| Some(account()));
    let mut heard = Vec::new();
    client.read_to_end(&mut heard).unwrap();
    assert_eq!(serde_json::from_slice::<Account>(&heard).unwrap(), account());
}
