//! Clients of a status socket that send a query, send nothing, send something else, or are too
//! many.

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

fn status() -> JobStatus {
    JobStatus {
        job: "0f".into(),
        launcher: 1,
        program: "./a \"b\"".into(),
        began: 2,
        recover: true,
        checkpoints: false,
        local_by_library: false,
        restarts: 3,
        ranks: Vec::new(),
        paths: None,
        log_status: None,
    }
}

fn answer_ranks(question: StatusQuery) -> Option<JobStatus> {
    (question == StatusQuery::Ranks).then(status)
}

/// Connects a client that sends `words`, serves the socket, and returns the bytes that the client
/// receives.
fn ask(status_socket: &mut StatusSocket, words: &[u8]) -> Vec<u8> {
    let mut client = UnixStream::connect(&status_socket.path).unwrap();
    client.write_all(words).unwrap();
    for _ in 0..3 {
        status_socket.serve(Instant::now(), answer_ranks);
    }
    client.set_nonblocking(true).unwrap();
    let mut heard = Vec::new();
    let _ = client.read_to_end(&mut heard);
    heard
}

#[test]
fn who_asks_is_answered_and_nothing_is_left() {
    let directory = scratch("asks");
    let mut status_socket = StatusSocket::open(&directory.0, "job").unwrap();
    let heard = ask(&mut status_socket, StatusQuery::Ranks.line().as_bytes());
    assert_eq!(serde_json::from_slice::<JobStatus>(&heard).unwrap(), status());
    assert!(status_socket.clients.is_empty());
    assert_eq!(ask(&mut status_socket, b"rule 1\n"), b"");
    assert!(status_socket.clients.is_empty(), "a client that says something else is left at once");
    assert_eq!(ask(&mut status_socket, b"ranks"), b"");
    status_socket.serve(Instant::now(), answer_ranks);
    assert_eq!(status_socket.clients.len(), 0, "it has gone");
    drop(status_socket);
    assert_eq!(std::fs::read_dir(&directory.0).unwrap().count(), 0);
}

#[test]
fn every_question_is_read_as_it_is_said_and_nothing_else_is_one() {
    let story = StatusQuery::Deliveries { rank: u32::MAX, from: u64::MAX, count: u64::MAX };
    let [all, one] = [None, Some(u32::MAX)].map(|rank| StatusQuery::Checkpoint { rank });
    for question in [StatusQuery::Ranks, StatusQuery::Paths, StatusQuery::Log, story, all, one] {
        let words = question.line();
        assert_eq!(StatusQuery::parse(words.as_bytes()), Some(question));
        let begins = |length: usize| StatusQuery::may_begin(&words.as_bytes()[..length]);
        assert!((0..words.len()).all(begins) && !begins(words.len()), "{words}");
    }
    for words in
        ["", "\n", "log\n", "deliveries 1 2 3\n", "deliveries 1 2 3 x\n", "log 1\n\n", "ranks 2\n"]
    {
        assert_eq!(StatusQuery::parse(words.as_bytes()), None, "{words:?}");
    }
    assert!(!StatusQuery::may_begin(b"rule") && !StatusQuery::may_begin(&[b'1'; 100]));
}

#[test]
fn who_stays_silent_is_left_and_a_crowd_waits() {
    let directory = scratch("crowd");
    let mut status_socket = StatusSocket::open(&directory.0, "job").unwrap();
    let connect = |_| UnixStream::connect(&status_socket.path).unwrap();
    let crowd: Vec<UnixStream> = (0..CLIENTS_MAX + 2).map(connect).collect();
    let now = Instant::now();
    status_socket.serve(now, answer_ranks);
    assert_eq!(status_socket.clients.len(), CLIENTS_MAX);
    assert_eq!(status_socket.descriptors().count(), CLIENTS_MAX, "the listener is not looked at");
    assert_eq!(status_socket.next_time(), Some(now + CLIENT_TIME));
    status_socket.serve(now + CLIENT_TIME, answer_ranks);
    assert_eq!(status_socket.clients.len(), 0);
    status_socket.serve(now + CLIENT_TIME, answer_ranks);
    assert_eq!(status_socket.clients.len(), 2);
    drop(crowd);
}

#[test]
fn a_directory_that_others_can_open_is_not_used() {
    let directory = scratch("others");
    std::fs::create_dir(&directory.0).unwrap();
    std::fs::set_permissions(&directory.0, std::fs::Permissions::from_mode(0o755)).unwrap();
    let error = StatusSocket::open(&directory.0, "job").err().unwrap();
    assert!(error.to_string().contains("only this user"), "{error}");
    std::fs::set_permissions(&directory.0, std::fs::Permissions::from_mode(0o700)).unwrap();
    let link = scratch("link");
    std::os::unix::fs::symlink(&directory.0, &link.0).unwrap();
    assert!(StatusSocket::open(&link.0, "job").is_err());
    std::fs::remove_file(&link.0).unwrap();
    assert!(StatusSocket::open(&directory.0, "job").is_ok());
}

#[test]
fn who_asks_for_what_takes_a_while_is_answered_when_it_is_known() {
    let directory = scratch("while");
    let mut status_socket = StatusSocket::open(&directory.0, "job").unwrap();
    assert_eq!(
        ask(&mut status_socket, StatusQuery::Paths.line().as_bytes()),
        b"",
        "it is not known"
    );
    status_socket.serve(Instant::now(), answer_ranks);
    assert_eq!(status_socket.clients.len(), 0, "who has asked has gone");
    let mut client = UnixStream::connect(&status_socket.path).unwrap();
    client.write_all(StatusQuery::Paths.line().as_bytes()).unwrap();
    status_socket.serve(Instant::now(), answer_ranks);
    assert_eq!(status_socket.clients.len(), 1);
    status_socket.serve(Instant::now(), |_| Some(status()));
    let mut heard = Vec::new();
    client.read_to_end(&mut heard).unwrap();
    assert_eq!(serde_json::from_slice::<JobStatus>(&heard).unwrap(), status());
}
