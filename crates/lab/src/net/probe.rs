//! Small measurements of the network, for the lab's own tests and for users.
//!
//! `serve` answers on one port: UDP datagrams are sent back unchanged; a TCP connection is read to
//! its end, and the answer holds the number of bytes after the first read and the time they took.
//! All other functions are clients of `serve`.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

/// Timeout of a client for a connection or an answer.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Bytes of one write or read.
const BLOCK_BYTES: usize = 256 * 1024;

/// Answers on `port` until killed; prints `ready` when both sockets are open.
pub fn serve(port: u16) -> anyhow::Result<()> {
    let address = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), port);
    let udp = UdpSocket::bind(address).with_context(|| format!("cannot use UDP port {port}"))?;
    let tcp = TcpListener::bind(address).with_context(|| format!("cannot use TCP port {port}"))?;
    thread::spawn(move || echo(&udp));
    println!("ready");
    for connection in tcp.incoming().flatten() {
        // One connection at a time is enough; a client that aborts affects only itself.
        let _ = swallow(connection);
    }
    Ok(())
}

fn echo(udp: &UdpSocket) {
    let mut datagram = [0; 65_536];
    while let Ok((bytes, from)) = udp.recv_from(&mut datagram) {
        let _ = udp.send_to(&datagram[..bytes], from);
    }
}

fn swallow(mut connection: TcpStream) -> std::io::Result<()> {
    let mut block = vec![0; BLOCK_BYTES];
    // The clock starts after the first read, whose bytes arrived earlier and do not count.
    let mut total = 0;
    let _ = connection.read(&mut block)?;
    let began = Instant::now();
    loop {
        match connection.read(&mut block)? {
            0 => break,
            bytes => total += bytes as u64,
        }
    }
    let nanos = began.elapsed().as_nanos() as u64;
    connection.write_all(&total.to_be_bytes())?;
    connection.write_all(&nanos.to_be_bytes())
}

/// Sorted round trips of small datagrams, without unanswered datagrams.
pub fn round_trips(server: SocketAddr, count: u32) -> anyhow::Result<Vec<Duration>> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect(server)?;
    socket.set_read_timeout(Some(TIMEOUT))?;
    let mut times = Vec::new();
    for number in 0..count {
        let sent = Instant::now();
        socket.send(&number.to_be_bytes())?;
        let mut answer = [0; 4];
        if socket.recv(&mut answer).is_ok() && answer == number.to_be_bytes() {
            times.push(sent.elapsed());
        }
    }
    times.sort();
    Ok(times)
}

/// Rate of one TCP connection in bits per second, measured at the receiver.
pub fn rate(server: SocketAddr, time: Duration) -> anyhow::Result<f64> {
    let mut connection = TcpStream::connect_timeout(&server, TIMEOUT)?;
    let block = vec![0x5a; BLOCK_BYTES];
    let began = Instant::now();
    while began.elapsed() < time {
        connection.write_all(&block)?;
    }
    connection.shutdown(Shutdown::Write)?;
    // The last bytes may still wait in a slow link's queue.
    connection.set_read_timeout(Some(time + 4 * TIMEOUT))?;
    let mut answer = [0; 16];
    connection.read_exact(&mut answer)?;
    let (bytes, nanos) = answer.split_at(8);
    let number =
        |part: &[u8]| part.iter().fold(0u64, |value, &byte| value << 8 | u64::from(byte)) as f64;
    if number(nanos) == 0.0 {
        bail!("the transfer was too short to measure");
    }
    Ok(number(bytes) * 8e9 / number(nanos))
}

/// Counts of datagrams that were sent to the server and came back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Echoes {
    /// All datagrams that came back and that the kernel accepted.
    pub received: u32,
    /// Datagrams in which a byte has changed.
    pub corrupted: u32,
    /// Datagrams that had arrived before.
    pub duplicated: u32,
    /// Datagrams that arrived after a datagram that was sent later.
    pub reordered: u32,
}

/// Sends numbered datagrams of `bytes` bytes at a steady pace and compares the datagrams that come
/// back.
pub fn echoes(
    server: SocketAddr,
    count: u32,
    bytes: usize,
    pace: Duration,
) -> anyhow::Result<Echoes> {
    Ok(judge(&exchange(server, count, bytes, pace)?, bytes))
}

fn judge(datagrams: &[Vec<u8>], bytes: usize) -> Echoes {
    let mut echoes = Echoes::default();
    let mut seen = BTreeSet::new();
    for datagram in datagrams {
        echoes.received += 1;
        match number_of(datagram) {
            Some(number) if *datagram == numbered(number, bytes) => {
                echoes.reordered += u32::from(seen.last().is_some_and(|&last| last > number));
                echoes.duplicated += u32::from(!seen.insert(number));
            }
            _ => echoes.corrupted += 1,
        }
    }
    echoes
}

/// Sends numbered datagrams of `bytes` bytes at a steady pace and returns the numbers of those that
/// come back, in order of arrival.
pub fn survivors(
    server: SocketAddr,
    count: u32,
    bytes: usize,
    pace: Duration,
) -> anyhow::Result<Vec<u32>> {
    let datagrams = exchange(server, count, bytes, pace)?;
    Ok(datagrams.iter().filter_map(|datagram| number_of(datagram)).collect())
}

/// The datagrams that came back, in order of arrival.
fn exchange(
    server: SocketAddr,
    count: u32,
    bytes: usize,
    pace: Duration,
) -> anyhow::Result<Vec<Vec<u8>>> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect(server)?;
    // No datagram arrives after a silence of this length.
    socket.set_read_timeout(Some(Duration::from_millis(500)))?;
    let receiver = socket.try_clone()?;
    let arrivals = thread::spawn(move || {
        let mut seen = Vec::new();
        let mut datagram = [0; 65_536];
        while let Ok(bytes) = receiver.recv(&mut datagram) {
            seen.push(datagram[..bytes].to_vec());
        }
        seen
    });
    for number in 0..count {
        // An interface that is down refuses the datagram, which counts as lost.
        let _ = socket.send(&numbered(number, bytes));
        thread::sleep(pace);
    }
    arrivals.join().map_err(|_| anyhow::anyhow!("the receiving thread failed"))
}

/// A datagram: its number, then bytes that differ from one datagram to the next.
fn numbered(number: u32, bytes: usize) -> Vec<u8> {
    let pattern = (0..bytes.saturating_sub(4)).map(|at| (at as u32 ^ number) as u8);
    number.to_be_bytes().into_iter().chain(pattern).collect()
}

fn number_of(datagram: &[u8]) -> Option<u32> {
    datagram.first_chunk::<4>().map(|number| u32::from_be_bytes(*number))
}

/// Connects to a TCP server within `timeout`.
pub fn connect(server: SocketAddr, timeout: Duration) -> std::io::Result<()> {
    TcpStream::connect_timeout(&server, timeout).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_back_is_judged() {
        let mut corrupted = numbered(3, 40);
        corrupted[30] ^= 4;
        let datagrams =
            [numbered(0, 40), numbered(2, 40), numbered(1, 40), numbered(2, 40), corrupted];
        let wanted = Echoes { received: 5, corrupted: 1, duplicated: 1, reordered: 1 };
        assert_eq!(judge(&datagrams, 40), wanted);
    }
}
