//! Tests of pending connections: what the log reports of refused ones, and where an endpoint
//! listens.

use std::process::Command;

use landbridge_proto::wire::hello::OPEN_BYTES;

use super::*;

const OTHERS: usize = 300;

#[test]
fn connections_without_number_of_other_processes_cost_a_few_lines_that_count_them_all() {
    let name = "connections_without_number_of_other_processes_cost_a_few_lines_that_count_them_all";
    assert_few_lines_count_all(name, |party| {
        for _ in 0..OTHERS {
            let mut stream = connect(party);
            stream.write_all(&[b'G'; OPEN_BYTES]).unwrap();
            until(|| {
                party.engine.progress();
                is_closed(&mut stream)
            });
        }
    });
}

/// More connections than there are slots: some wait in the listening queue until others have ended.
#[test]
fn connections_without_number_that_say_nothing_cost_a_few_lines_that_count_them_all() {
    let name = "connections_without_number_that_say_nothing_cost_a_few_lines_that_count_them_all";
    assert_few_lines_count_all(name, |party| {
        let mut idle: Vec<TcpStream> = (0..OTHERS).map(|_| connect(party)).collect();
        until(|| {
            party.engine.progress();
            idle.retain_mut(|stream| !is_closed(stream));
            idle.is_empty()
        });
    });
}

/// Runs the test with this name again, in a process whose standard error is the log. There, `visit`
/// makes [`OTHERS`] connections to an endpoint, which refuses them all.
fn assert_few_lines_count_all(name: &str, visit: fn(&mut Party)) {
    const CHILD: &str = "LANDBRIDGE_TEST_OTHERS";
    if std::env::var_os(CHILD).is_some() {
        let mut party = Party::open();
        visit(&mut party);
        party.engine.close();
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--nocapture", "--exact", &format!("engine::tests::pending_connections::{name}")]);
    let began = Instant::now();
    let output = child.env(CHILD, "1").env("LANDBRIDGE_LOG", "warn").output().unwrap();
    let seconds = began.elapsed().as_secs() as usize;
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{log}");
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("refused: ")).collect();
    let (first, others): (Vec<&str>, Vec<&str>) =
        lines.iter().partition(|line| line.contains("a connection of 127.0.0.1:"));
    let count = |line: &&str| -> usize {
        let (before, _) = line.split_once(" more connections were refused").unwrap();
        before.rsplit(' ').next().unwrap().parse().unwrap()
    };
    let counted: usize = others.iter().map(count).sum();
    assert_eq!(first.len() + counted, OTHERS, "{log}");
    assert!(lines.len() <= 2 * (seconds + 2), "{} lines in {seconds} s: {log}", lines.len());
}

fn connect(party: &Party) -> TcpStream {
    let port = Name::parse(&party.name()).unwrap().port;
    let stream = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port))).unwrap();
    stream.set_nonblocking(true).unwrap();
    stream
}

fn is_closed(stream: &mut TcpStream) -> bool {
    match stream.read(&mut [0]) {
        Ok(count) => count == 0,
        Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
    }
}
