//! Shows and changes a running lab.
//!
//! A lab listens on two Unix sockets: an abstract socket with the names of the user and the lab, in
//! the network namespace from which the lab was started; and `control` in the lab's directory, for
//! programs inside the lab. Only the user who started the lab is served. A client sends one line
//! and gets lines back, the last of which is `ok` or `error: …`:
//!
//! - `show`: every direction with its shape and counters.
//! - `set LINK KEY[=VALUE]…`: LINK is `north-south` (both directions), `north>south`, or
//!   `north-LAN1` (all links of a rail); keys are the keys of a link in a lab file, `up`, and
//!   `restore` (the values of the lab file).
//! - `interface HOST DEVICE up|down` and `relay SITE stop|continue`: see `hosts`.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};

use super::emulator::Emulator;
use super::hosts;
use super::link::Shape;
use super::namespace::LAB_DIR;
use super::plan::{Plan, describe};
use super::pump::Handle;

/// Bytes of a request at most; a request contains one link and a dozen keys at most.
const REQUEST_BYTES_MAX: u64 = 4096;
/// Timeout of a client's reads and writes; a slower client is dropped.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(2);

/// Opens the socket at which `landbridge lab link` of the same user finds the lab. Fails if a lab
/// of this name is running.
pub fn listen_outside(lab_name: &str) -> anyhow::Result<UnixListener> {
    UnixListener::bind_addr(&outside_address(lab_name)?).map_err(|error| match error.kind() {
        ErrorKind::AddrInUse => anyhow::anyhow!(
            "a lab called `{lab_name}` is running already: give this one another name with --name"
        ),
        _ => anyhow::anyhow!("cannot listen for `landbridge lab link`: {error}"),
    })
}

/// Opens the socket in the lab's directory; the caller is inside the lab.
pub fn listen_inside() -> anyhow::Result<UnixListener> {
    UnixListener::bind(inside_path()).context("cannot listen inside the lab")
}

/// Serves both sockets, each on a thread of its own.
pub fn serve(
    handle: Handle,
    plan: &Plan,
    outside: UnixListener,
    inside: UnixListener,
) -> std::io::Result<()> {
    let lab = Arc::new((handle, plan.clone()));
    for listener in [outside, inside] {
        let lab = Arc::clone(&lab);
        thread::Builder::new().name("control".into()).spawn(move || {
            for client in listener.incoming().flatten() {
                // An error of one client does not affect other clients.
                let _ = serve_client(&lab.0, &lab.1, client);
            }
        })?;
    }
    Ok(())
}

/// Sends a request to a lab and returns the answer. Without a name, the request goes to the lab
/// that contains the caller.
pub fn request(lab_name: Option<&str>, line: &str) -> anyhow::Result<String> {
    let mut stream = match lab_name {
        Some(name) => connect(name)?,
        None if !is_inside_any() => bail!("name the lab: this is not inside one"),
        None => UnixStream::connect(inside_path()).context("cannot reach this lab")?,
    };
    stream.set_read_timeout(Some(CLIENT_TIMEOUT))?;
    stream.write_all(format!("{line}\n").as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).context("the lab does not answer")?;
    let (body, verdict) = answer.trim_end().rsplit_once('\n').unwrap_or(("", answer.trim_end()));
    match verdict.strip_prefix("error: ") {
        Some(message) => bail!("{message}"),
        None => Ok(body.to_owned()),
    }
}

fn connect(lab_name: &str) -> anyhow::Result<UnixStream> {
    let error = match UnixStream::connect_addr(&outside_address(lab_name)?) {
        Ok(stream) => return Ok(stream),
        Err(_) if is_inside(lab_name) => return Ok(UnixStream::connect(inside_path())?),
        Err(error) => error,
    };
    match error.kind() {
        // No lab listens; the system's own error text would not help a user.
        ErrorKind::ConnectionRefused => bail!(
            "no lab called `{lab_name}` of this user is running here; in another terminal, \
             `landbridge lab run FILE -- bash` starts one, called by the `name` in FILE or --name"
        ),
        _ => Err(error).with_context(|| format!("cannot reach the lab `{lab_name}`")),
    }
}

/// Whether the caller runs in a lab of this name.
fn is_inside(lab_name: &str) -> bool {
    std::env::var("LANDBRIDGE_LAB").is_ok_and(|name| name == lab_name)
}

/// Whether the caller runs in a lab.
pub fn is_inside_any() -> bool {
    std::env::var_os("LANDBRIDGE_LAB").is_some()
}

fn outside_address(lab_name: &str) -> anyhow::Result<SocketAddr> {
    let user = rustix::process::geteuid().as_raw();
    SocketAddr::from_abstract_name(format!("landbridge-lab/{user}/{lab_name}"))
        .with_context(|| format!("`{lab_name}` is too long for the name of a lab"))
}

fn inside_path() -> PathBuf {
    Path::new(LAB_DIR).join("control")
}

fn serve_client(handle: &Handle, plan: &Plan, mut client: UnixStream) -> anyhow::Result<()> {
    client.set_read_timeout(Some(CLIENT_TIMEOUT))?;
    client.set_write_timeout(Some(CLIENT_TIMEOUT))?;
    let mut line = String::new();
    BufReader::new((&client).take(REQUEST_BYTES_MAX)).read_line(&mut line)?;
    // In the lab's user namespace the lab's user is root, and every other user is nobody.
    if peer_user(&client)? != rustix::process::geteuid().as_raw() {
        client.write_all(b"error: this lab belongs to another user\n")?;
        return Ok(());
    }
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let is_about_hosts = match words.first() {
        Some(&"interface") => Some(hosts::set_interface(plan, &words[1..])),
        Some(&"relay") => Some(hosts::signal_relay(plan, &words[1..])),
        _ => None,
    };
    let answer = match is_about_hosts {
        Some(done) => done.map_err(|error| hosts::one_line(&error)),
        None => handle
            .ask(move |emulator| answer(emulator, line.trim()))
            .unwrap_or_else(|| Err("the emulator has ended".to_owned())),
    };
    match answer {
        Ok(body) => client.write_all(format!("{body}ok\n").as_bytes())?,
        Err(message) => client.write_all(format!("error: {message}\n").as_bytes())?,
    }
    Ok(())
}

/// The user id of the peer. The function does not use rustix, whose type cannot represent process
/// id 0, which SO_PEERCRED gives for a process outside of the lab's PID namespace.
fn peer_user(client: &UnixStream) -> std::io::Result<u32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut size = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `size` bytes to `peer`; both live during the call.
    let result = unsafe {
        libc::getsockopt(
            client.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut size,
        )
    };
    if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(peer.uid) }
}

/// The answer of the lab to a request: a body of whole lines, or an error text.
fn answer(emulator: &mut Emulator, request: &str) -> Result<String, String> {
    let mut words = request.split_ascii_whitespace();
    match words.next() {
        Some("show") => Ok(show(emulator)),
        Some("set") => {
            let link = words.next().ok_or("which link?")?;
            let changes: Vec<&str> = words.collect();
            change(emulator, link, &changes)
        }
        _ => Err("a request is `show`, `set`, `interface` or `relay`".to_owned()),
    }
}

fn show(emulator: &Emulator) -> String {
    let mut text = String::new();
    for (name, shape, counts) in emulator.links() {
        text += &format!(
            "{name}: {}; packets={} bytes={} lost={} overflowed={} cut={} duplicated={} \
             reordered={} corrupted={} oversized={}\n",
            describe(shape),
            counts.packets,
            counts.bytes,
            counts.lost,
            counts.overflowed,
            counts.cut,
            counts.duplicated,
            counts.reordered,
            counts.corrupted,
            counts.oversized,
        );
    }
    text + &format!("unroutable={}\n", emulator.unroutable())
}

fn change(emulator: &mut Emulator, link: &str, changes: &[&str]) -> Result<String, String> {
    let directions = emulator.directions(link);
    if directions.is_empty() {
        let names = emulator.names().join(", ");
        return Err(format!(
            "there is no link `{link}`; there are {names} (one direction: 'a>b' in place of a-b)"
        ));
    }
    let mut text = String::new();
    for (direction, is_up) in directions {
        let current = emulator.links().find(|(name, ..)| *name == direction);
        let mut shape = current.map(|(_, shape, _)| shape.clone()).unwrap_or_default();
        for change in changes {
            match *change {
                "restore" => shape = emulator.original(&direction).cloned().unwrap_or_default(),
                _ => apply(&mut shape, change, is_up)?,
            }
        }
        text += &format!("{direction}: {}\n", describe(&shape));
        emulator.reshape(&direction, |_| shape);
    }
    Ok(text)
}

/// Changes one property of a shape. An uplink to a rail's switch has no random faults and no delay:
/// these apply once, on the downlink.
fn apply(shape: &mut Shape, change: &str, is_uplink: bool) -> Result<(), String> {
    let (key, value) = change.split_once('=').unwrap_or((change, ""));
    if is_uplink && !matches!(key, "rate" | "queue" | "down" | "up") {
        return apply(&mut shape.clone(), change, false);
    }
    match key {
        "rate" if value == "unlimited" => shape.rate = None,
        "rate" => shape.rate = Some(read(value)?),
        "delay" => shape.delay = read(value)?,
        "jitter" => shape.jitter = read(value)?,
        "loss" => shape.loss = read(value)?,
        "duplicate" => shape.duplicate = read(value)?,
        "reorder" => shape.reorder = read(value)?,
        "reorder_by" => shape.reorder_by = read(value)?,
        "corrupt" => shape.corrupt = read(value)?,
        "repair_checksums" => shape.repair_checksums = value != "false",
        "queue" => shape.queue = Some(read(value)?),
        "mtu" if value == "none" => shape.mtu = None,
        "mtu" => shape.mtu = Some(read(value)?),
        "down" => shape.down = value != "false",
        "up" => shape.down = false,
        _ => return Err(format!("a link has no `{key}`")),
    }
    Ok(())
}

fn read<T: FromStr<Err: ToString>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error: T::Err| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::super::file;
    use super::*;

    #[test]
    fn links_can_be_shown_and_changed() {
        let mut emulator = emulator();
        assert!(show(&emulator).contains("a-x>b: 1 Mbit/s"));
        let text = answer(&mut emulator, "set a-x-b loss=5% rate=2Mbit/s").unwrap();
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.lines().all(|line| line.contains("loss 5 %") && line.contains("2 Mbit/s")));
        let text = answer(&mut emulator, "set a-x>b down").unwrap();
        assert!(text.starts_with("a-x>b:") && text.contains("DOWN"), "{text}");
        answer(&mut emulator, "set a-x>b up").unwrap();
        assert!(!show(&emulator).contains("DOWN"));
    }

    #[test]
    fn a_link_goes_back_to_what_the_file_says() {
        let mut emulator = emulator();
        let before = show(&emulator);
        answer(&mut emulator, "set a-x-b loss=5% rate=2Mbit/s down").unwrap();
        assert_ne!(show(&emulator), before);
        answer(&mut emulator, "set a-x-b restore").unwrap();
        assert_eq!(show(&emulator), before);
    }

    #[test]
    fn chance_strikes_once_on_a_rail() {
        let lab = "[[site]]\nname='a'\nhosts=1\nrails=2\n";
        let (mut emulator, _) = Emulator::new(&file::parse(lab, "x").unwrap());
        let text = answer(&mut emulator, "set a-LAN1 loss=5% rate=2Mbit/s").unwrap();
        let count = |word: &str| text.lines().filter(|line| line.contains(word)).count();
        assert_eq!((count(": "), count("2 Mbit/s"), count("loss")), (4, 4, 2), "{text}");
        let error = answer(&mut emulator, "set a-LAN1 loss=many").unwrap_err();
        assert!(error.contains("is not a share"), "{error}");
        let error = answer(&mut emulator, "set a-LAN7 down").unwrap_err();
        let names = "a-LAN0, a-LAN1, a-1-LAN0, a-gw-LAN0, a-1-LAN1, a-gw-LAN1";
        assert!(error.contains(&format!("there are {names} (")), "{error}");
        assert!(!show(&emulator).contains("LAN0: unlimited rate, delay 0 ns, loss"));
    }

    #[test]
    fn wrong_requests_change_nothing_and_say_what_is_right() {
        let mut emulator = emulator();
        let before = show(&emulator);
        for (request, words) in [
            ("", "a request is"),
            ("set a-x-b restore=now", "no `restore`"),
            ("set", "which link?"),
            ("set a-c down", "there are a-x-b (one direction"),
            ("set a-x-b rate=3Mbit/s colour=red", "no `colour`"),
            ("set a-x-b loss=200%", "is not a share"),
        ] {
            let error = answer(&mut emulator, request).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        assert_eq!(show(&emulator), before);
    }

    fn emulator() -> Emulator {
        let lab = "[[site]]\nname='a-x'\nhosts=1\n[[site]]\nname='b'\nhosts=1\n\
                   [[link]]\nbetween=['a-x','b']\nrate='1 Mbit/s'\n";
        Emulator::new(&file::parse(lab, "x").unwrap()).0
    }
}
