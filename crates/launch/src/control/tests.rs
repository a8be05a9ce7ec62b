//! Tests of the coding of every control message: whole, in pieces and malformed.

use super::*;
use crate::output_log::OutputLog;
use crate::restart::IncarnationRecord;
use spawn_order::Task;

fn node(name: &str, first_rank: u32, children: Vec<Node>) -> Node {
    Node {
        cluster: 1,
        cluster_name: "nancy".into(),
        name: name.into(),
        address: Some("10.0.0.1".into()),
        first_rank,
        rank_count: 2,
        slots: 3,
        machine_ranks: 0,
        is_spare: false,
        spares: Vec::new(),
        relay_unix: None,
        remote: true,
        spawn: vec!["ssh".into(), "host with space".into()],
        children,
    }
}

fn frame_transfer(step: FrameTransferStep) -> Message {
    Message::FrameTransfer(Box::new(FrameTransfer { from: 3, to: 1023, step }))
}

fn task() -> Task {
    Task {
        program: "./a.out".into(),
        arguments: vec!["tab\there".into(), "quote\"'\n".into()],
        wdir: "/tmp".into(),
        search: String::new(),
        environment: vec![("NAME".into(), "va=lue".into())],
    }
}

fn order() -> SpawnOrder {
    let block = spawn_order::Block {
        cluster: 1,
        node: "n2".into(),
        appnum: 0,
        first_rank: 0,
        first_index: 70,
        count: 2,
    };
    SpawnOrder {
        group: 3,
        kvsname: "kvs_3".into(),
        mapping: "(vector,(0,1,2))".into(),
        size: 2,
        keys: vec![("k".into(), "v = \"1\"".into())],
        tasks: vec![task()],
        blocks: vec![block],
    }
}

fn assignment() -> Assignment {
    Assignment {
        job: Job {
            id: "0".repeat(32),
            key: "f".repeat(64),
            size: 4,
            kvsname: "kvs".into(),
            mapping: "(vector,(0,2,2))".into(),
            universe: 6,
            applications: vec![spawn_order::Application { ranks: 4, task: task() }],
            provider: Some("tcp".into()),
            environment: vec![("NAME".into(), "multi\nline = \"x\"".into())],
            verbose: true,
            limits: RestartLimits { restarts_max: 3, within_s: 9 },
            has_spares: true,
            local: LocalTransport::Library,
        },
        node: node("n1", 0, vec![node("n2", 2, vec![])]),
    }
}

fn spawn_command() -> crate::pmi::spawn::SpawnCommand {
    crate::pmi::spawn::SpawnCommand {
        program: "p".into(),
        arguments: vec!["\u{1}".into(), String::new()],
        count: 2,
        info: vec![("host".into(), "n1,n2".into())],
    }
}

fn every_message() -> Vec<Message> {
    let delta = vec![("k".to_string(), "v".to_string()), (String::new(), "w".repeat(3000))];
    let command = spawn_command();
    let spawn = Request { commands: vec![command], keys: delta.clone() };
    let request = NameRequest::Publish { service: "s".into(), port: "p".into() };
    let mut all = messages_about_ranks();
    all.extend(messages_about_logs());
    all.extend([
        Message::Assign(Box::new(assignment())),
        Message::StartRelay { config: "job = 1".into() },
        Message::Start { relay: "h:1".into() },
        Message::BarrierDown { group: 3, delta: delta.clone() },
        Message::Answer { rank: 9, line: "cmd=x\n".into() },
        Message::SpawnOrder(Box::new(order())),
        Message::Revoke { group: 3 },
        Message::Stdin { bytes: vec![0, 255] },
        Message::StdinEnd,
        Message::End { at_once: true },
        Message::Ping,
        Message::TakeCheckpoints { rank: None },
        Message::TakeCheckpoints { rank: Some(7) },
        Message::QueryPaths { serial: 3, rows_max: 9 },
        Message::QueryLog { serial: 3, question: "all 0".into() },
        Message::Ready,
        Message::RelayReady { ranks: "a:1".into(), relays: "-".into() },
        Message::RelayLink { cluster: 3, address: "a:1".into(), problem: "x".into() },
        Message::BarrierUp { group: 0, delta },
        Message::Name { rank: 1, request },
        Message::Name { rank: 1, request: NameRequest::Lookup { service: "s".into() } },
        Message::Spawn { rank: 1, request: Box::new(spawn) },
        Message::Started { group: 3, problem: "no".into() },
        Message::Abort { rank: 3, code: -1, message: "m".into() },
        Message::Adopt(Box::new(adoption())),
        Message::Spares(Spares { names: vec!["n3".into(), String::new()] }),
        Message::MakeDurable { rank: 4, serial: 7 },
        Message::Durable { rank: 4, serial: 7 },
        Message::Moved(Box::new(Moved { cluster: 1, from: "b".into(), to: "c".into() })),
        Message::Output { rank: 0, stream: Stream::Stderr, bytes: vec![1], own: 1 },
        Message::StdinTaken { bytes: 7 },
        Message::Exited { group: 0, rank: 2, ending: Ending::Killed(11), stage: Stage::Joined },
        Message::Exited { group: 0, rank: 2, ending: Ending::Exited(3), stage: Stage::Finalized },
        Message::Checkpoint { rank: 2, number: 7, bytes: 1 << 40 },
        Message::Stuck { rank: 5 },
        Message::Failed { text: "no".into() },
        Message::Note { text: "so".into() },
        Message::Advice { node: "n1".into(), text: "so".into() },
        Message::RelayLog { text: "log".into() },
        Message::Paths { serial: 3, paths: Box::new(Paths { ranks: 2, ..Paths::default() }) },
        Message::LogStatus { serial: 3, lines: "{}\n".into() },
        Message::Done,
    ]);
    all
}

fn messages_about_logs() -> Vec<Message> {
    vec![
        Message::Again { ranks: vec![3, 8] },
        Message::LogsLost { ranks: vec![3, 8] },
        Message::LogContact { rank: 3, contact: vec![1, 255] },
        frame_transfer(FrameTransferStep::Ask { digest_from: None, has_ended: false }),
        frame_transfer(FrameTransferStep::Ask { digest_from: Some(64), has_ended: true }),
        frame_transfer(FrameTransferStep::NotYet),
        frame_transfer(FrameTransferStep::Arrived { position: u64::MAX, digest: None }),
        frame_transfer(FrameTransferStep::Arrived {
            position: 640,
            digest: Some(LogDigest { from: 64, digest: Some(1) }),
        }),
        frame_transfer(FrameTransferStep::Frames {
            moves: 1,
            position: 64,
            digest_from: Some(64),
            bytes: vec![0, 255],
        }),
    ]
}

fn messages_about_ranks() -> Vec<Message> {
    vec![
        Message::RankUpdate(Box::new(RankUpdate::PmiRequest {
            rank: 4,
            question: "cmd=get\n".to_string(),
        })),
        Message::RankUpdate(Box::new(RankUpdate::Unstartable { rank: 4, why: "no".to_string() })),
        Message::RankUpdate(Box::new(RankUpdate::IncarnationEnded {
            rank: 4,
            incarnation: adoption().ranks[0].incarnations[0],
            last_words: Some(12),
        })),
        Message::RankUpdate(Box::new(RankUpdate::PmiReply {
            rank: 4,
            answer: "cmd=got\n".to_string(),
        })),
        Message::RecordingUpdate(Box::new(recording_update())),
        Message::RecordingUpdate(Box::new(RecordingUpdate {
            is_full: false,
            continues: true,
            ..recording_update()
        })),
        Message::Alive { group: 3, rank: 2, pid: 70, incarnation: 1, is_live: true, percent: None },
        Message::Alive {
            group: 0,
            rank: 2,
            pid: 70,
            incarnation: 1,
            is_live: false,
            percent: Some(43),
        },
    ]
}

#[test]
fn every_message_survives_in_pieces_of_any_size() {
    let messages = every_message();
    let mut bytes = Vec::new();
    messages.iter().for_each(|message| message.emit(&mut bytes));
    for piece in [1, 2, 3, 7, 1000, bytes.len()] {
        let mut decoder = Decoder::default();
        let mut seen = Vec::new();
        for bytes in bytes.chunks(piece) {
            decoder.handle_bytes(bytes);
            while let Some(message) = decoder.poll_message().unwrap() {
                seen.push(message);
            }
        }
        assert_eq!(seen, messages);
    }
}

#[test]
fn absurd_length_is_refused_before_its_body_comes() {
    let mut decoder = Decoder::default();
    decoder.handle_bytes(&u32::MAX.to_le_bytes());
    assert_eq!(decoder.poll_message(), Err(FrameError::TooLong(u32::MAX as usize)));
}

#[test]
fn cut_and_padded_bodies_are_refused() {
    for message in every_message() {
        let mut frame = Vec::new();
        message.emit(&mut frame);
        let body = &frame[LENGTH_BYTES..];
        for length in 0..body.len().min(64) {
            assert_eq!(Message::parse(&body[..length]), None, "{message:?}");
        }
        let padded = [body, &[0]].concat();
        assert_eq!(Message::parse(&padded), None);
    }
    assert_eq!(Message::parse(&[200]), None);
}

#[test]
fn a_count_larger_than_the_body_takes_no_memory() {
    let mut frame = Vec::new();
    Message::BarrierUp { group: 0, delta: Vec::new() }.emit(&mut frame);
    let kind_and_group = &frame[LENGTH_BYTES..frame.len() - 1];
    let count = postcard::to_allocvec(&u32::MAX).unwrap();
    assert_eq!(Message::parse(&[kind_and_group, &count].concat()), None);
}

#[test]
fn ranks_below_are_held() {
    let tree = node("n1", 0, vec![node("n2", 2, vec![])]);
    assert!(tree.holds(0) && tree.holds(3) && !tree.holds(4));
    assert_eq!(tree.total_ranks(), 4);
}

#[test]
fn an_order_finds_its_hosts() {
    let (top, order) = (node("n1", 0, vec![node("n2", 2, vec![])]), order());
    assert_eq!(order.on(&top).count(), 0);
    assert_eq!(order.below(&top).count(), 1);
    assert_eq!(order.on(&top.children[0]).next().unwrap().indices(), 70..72);
    let elsewhere = Node { cluster: 0, ..node("n2", 0, vec![]) };
    assert_eq!(order.below(&elsewhere).count(), 0);
}

fn recording_update() -> RecordingUpdate {
    let determinants = vec![[1, 2, 3], [u64::MAX, 0, 1 << 40]];
    let (rank, from, polls, first_determinant) = (4, 1 << 33, 1 << 40, 1 << 35);
    let base = 1 << 34;
    let (reads, files) = (vec![7; 300], vec![9; 80]);
    let rest =
        RecordingUpdate { rank, base, from, polls, is_full: true, ..RecordingUpdate::default() };
    RecordingUpdate { reads, first_determinant, determinants, files, ..rest }
}

fn adoption() -> Adoption {
    let exchange = |answer: Option<&str>| rank_state::Exchange {
        question: "cmd=barrier_in\n".to_string(),
        answer: answer.map(str::to_string),
    };
    let exchanges = vec![exchange(Some("cmd=barrier_out rc=0\n")), exchange(None)];
    let images =
        vec![rank_state::CheckpointLocation { path: "rank-4.1/7".into(), tag: "f0".into() }];
    let incarnation = IncarnationRecord {
        began: Duration::from_millis(1_500),
        lasted: Duration::from_secs(3),
        ending: Ending::Killed(9),
        stage: Stage::Joined,
        has_fatal_notice: true,
        has_gone_back: true,
        point: crate::restart::ProgressPoint { asked: 1, printed: 2, polls: 3 },
    };
    let (incarnations, age) = (vec![incarnation, incarnation], Duration::from_secs(70));
    let (rank, restarts, moves) = (4, 2, 1);
    let mut outputs = [OutputLog::default(), OutputLog::default()];
    outputs[1].append(b"two\nlines \"\x00\xff\\");
    let one = rank_state::TransferredRank {
        rank,
        restarts,
        moves,
        outputs,
        last_words: Some(4),
        exchanges,
        incarnations,
        age,
        images,
    };
    let keys = vec![("a".to_string(), "1 \"2\"".to_string())];
    Adoption { has_reached: true, keys, ranks: vec![one, rank_state::TransferredRank::default()] }
}

#[test]
fn ranks_that_have_moved_are_found_where_they_are() {
    let spare = Node { rank_count: 0, is_spare: true, ..node("c", 6, vec![]) };
    let mut top = node("a", 0, vec![node("b", 4, vec![]), spare]);
    Moved { cluster: 0, from: "b".into(), to: "c".into() }.apply(&mut top);
    let held: Vec<_> = top.hosts().iter().map(|node| (node.first_rank, node.rank_count)).collect();
    assert_eq!(held, [(0, 2), (4, 0), (4, 2)]);
    assert!(top.children[1].holds(5) && !top.children[0].holds(5));
}

#[test]
fn every_rank_has_its_application() {
    let part = |ranks, program: &str| spawn_order::Application {
        ranks,
        task: Task { program: program.into(), ..task() },
    };
    let parts = [part(2, "a"), part(1, "b"), part(3, "c")];
    let found = |rank| {
        let (number, task) = spawn_order::application(&parts, rank);
        (number, task.program.as_str())
    };
    let expected = [(0, "a"), (0, "a"), (1, "b"), (2, "c"), (2, "c"), (2, "c"), (2, "c")];
    assert_eq!([0, 1, 2, 3, 4, 5, 6].map(found), expected);
}
