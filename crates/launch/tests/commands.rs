//! Tests of `landbridge env`, `doctor`, `relay` and `lab`.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{Landbridge, assert_code, python_of, stderr, stdout};
use rustix::net::{AddressFamily, SocketType, bind, getsockname, listen, socket};

#[test]
fn env_prints_what_a_shell_takes_in() {
    let lb = Landbridge::new("env-command");
    lb.directory.write("liblandbridge-fi.so", "");
    let binary = lb.binary().display().to_string();
    for (library, setting) in [
        ("mpich", "$MPIR_CVAR_CH4_NETMOD"),
        ("openmpi", "$OMPI_MCA_mtl"),
        ("impi", "$I_MPI_FABRICS"),
    ] {
        let script = format!(
            "eval \"$({binary} env --mpi {library})\" && echo {setting} $FI_PROVIDER \
             ${{#LANDBRIDGE_JOB}} ${{#LANDBRIDGE_KEY}} $FI_PROVIDER_PATH"
        );
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        let directory = lb.directory.0.canonicalize().unwrap();
        assert_eq!(stdout(&output), format!("ofi landbridge 32 64 {}\n", directory.display()));
    }
}

#[test]
fn without_a_provider_env_and_doctor_say_how_to_get_one() {
    let lb = Landbridge::new("no-provider");
    let output = lb.run(&["env", "--mpi", "mpich"]);
    assert_code(&output, 1);
    assert!(stderr(&output).contains("make build"), "{}", stderr(&output));
    let output = lb.run(&["doctor"]);
    assert_code(&output, 1);
    assert!(stdout(&output).contains("!!  liblandbridge-fi.so is missing"), "{}", stdout(&output));
    assert!(stdout(&output).contains("-> make build"), "{}", stdout(&output));
}

#[test]
fn doctor_says_what_it_did_not_find_where_it_was_to_look() {
    let lb = Landbridge::new("doctor-in");
    lb.directory.write("liblandbridge-fi.so", "");
    let empty = lb.directory.0.display().to_string();
    for (place, piece) in [("/no/such", "there is no such directory"), (&empty, "no MPI library")] {
        let output = lb.run(&["doctor", "--in", place]);
        assert_code(&output, 1);
        let text = stdout(&output);
        let line = text.lines().find(|line| line.contains(&format!("!!  --in {place}: ")));
        assert!(line.is_some_and(|line| line.contains(piece)), "{text}");
        assert!(text.contains("Paths between two processes\n"), "{text}");
    }
}

#[test]
fn doctor_looks_into_environments_below() {
    let Some(python) = python_of("mpich") else { return };
    let prefix = python.strip_suffix("/bin/python").unwrap();
    let parent = std::path::Path::new(prefix).parent().unwrap().display().to_string();
    let output = Landbridge::new("doctor-below").run(&["doctor", "--in", &parent]);
    let text = stdout(&output);
    assert!(text.contains(&format!("MPICH {prefix}/lib/")) && !text.contains("!!  --in"), "{text}");
}

#[test]
fn doctor_sees_what_the_checkout_has_fetched() {
    let Some(python) = python_of("mpich") else { return };
    let prefix = python.strip_suffix("/bin/python").unwrap();
    let lb = Landbridge::new("doctor-fetched");
    let (built, fetched) =
        (lb.directory.0.join("target/release"), lb.directory.0.join("build/venv"));
    std::fs::create_dir_all(&built).unwrap();
    std::fs::create_dir_all(&fetched).unwrap();
    std::os::unix::fs::symlink(prefix, fetched.join("mpich")).unwrap();
    std::fs::copy(lb.binary(), built.join("landbridge")).unwrap();
    let output = Command::new(built.join("landbridge")).arg("doctor").output().unwrap();
    let expected = format!("MPICH {}/mpich/lib/", fetched.canonicalize().unwrap().display());
    assert!(stdout(&output).contains(&expected), "{}", stdout(&output));
}

#[test]
fn doctor_sees_that_a_library_does_not_take_a_broken_provider() {
    let Some(python) = python_of("mpich") else { return };
    let prefix = python.strip_suffix("/bin/python").unwrap();
    let lb = Landbridge::new("broken-provider");
    lb.directory.write("liblandbridge-fi.so", "no library");
    let output = lb.run(&["doctor", "--in", prefix]);
    assert_code(&output, 1);
    let text = stdout(&output);
    assert!(text.contains("!!  MPICH ") && text.contains("does not load the provider"), "{text}");
    assert!(text.contains("doctor-probe"), "{text}");
}

#[test]
fn doctor_names_variables_that_choose_another_transport_and_what_follows() {
    let run = "`landbridge run` gives its ranks";
    let env = "`landbridge env --mpi openmpi` sets";
    let instead = |what: &str| format!("{run} {what} and says so; for an mpirun of your own");
    let rows = [
        ("FI_PROVIDER", "tcp", "than Landbridge", instead("FI_PROVIDER=landbridge")),
        ("MPIR_CVAR_CH4_NETMOD", "ucx", "than Landbridge", instead("MPIR_CVAR_CH4_NETMOD=ofi")),
        ("I_MPI_OFI_PROVIDER", "tcp", "than Landbridge", instead("I_MPI_OFI_PROVIDER=landbridge")),
        ("I_MPI_FABRICS", "shm:tcp", "than Landbridge", instead("I_MPI_FABRICS=ofi")),
        ("OMPI_MCA_pml", "ucx", "for Open MPI", format!("{env} OMPI_MCA_pml=cm")),
        ("OMPI_MCA_btl", "self,vader,tcp", "for Open MPI", format!("{env} OMPI_MCA_btl=self,ofi")),
        (
            "OMPI_MCA_mtl_ofi_provider_include",
            "psm3",
            "for Open MPI",
            format!("{env} no OMPI_MCA_mtl_ofi_provider_include"),
        ),
    ];
    let lb = Landbridge::new("doctor-transport");
    let mut command = lb.command(&["doctor"]);
    command.envs(rows.iter().map(|(name, value, ..)| (name, value)));
    let text = stdout(&command.output().unwrap());
    for (name, value, of, follows) in &rows {
        let is = format!("  --  {name}={value} is set here, and chooses another transport {of}");
        let mut lines = text.lines().skip_while(|line| *line != is).skip(1);
        let advice = lines.next().and_then(|line| line.strip_prefix("      -> "));
        assert!(advice.is_some_and(|advice| advice.starts_with(follows)), "{is} in {text}");
    }
    let mut command = lb.command(&["doctor"]);
    rows.iter().for_each(|(name, ..)| _ = command.env_remove(name));
    let text = stdout(&command.output().unwrap());
    assert!(!text.contains("is set here"), "{text}");
}

/// The longest wait for one address, as the doctor states it.
const RELAY_WAIT: Duration = Duration::from_secs(15);

/// Runs the doctor for an address without an answer. Returns what the doctor prints, and the time
/// from the line that announces the wait to the end.
fn doctor_waits_for(name: &str, address: SocketAddr) -> (String, Duration) {
    let lb = Landbridge::new(name);
    let mut command = lb.command(&["doctor", "--relay", &address.to_string()]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let announced = format!("is there a relay at {address}? (up to {} s)", RELAY_WAIT.as_secs());
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let line = lines.find(|line| line.as_ref().unwrap().contains(&announced));
    let began = Instant::now();
    assert!(line.is_some(), "{:?}", child.wait_with_output());
    let output = child.wait_with_output().unwrap();
    assert_code(&output, 1);
    (stdout(&output), began.elapsed())
}

#[test]
fn doctor_gives_up_an_address_that_never_answers_and_explains_the_firewall() {
    // A full queue of connections that nobody accepts: the kernel drops further ones, as a firewall
    // does.
    let silent = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&silent, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    listen(&silent, 0).unwrap();
    let address = SocketAddr::try_from(getsockname(&silent).unwrap()).unwrap();
    let _first = TcpStream::connect(address).unwrap();
    let second = TcpStream::connect_timeout(&address, Duration::from_millis(200));
    assert_eq!(second.unwrap_err().kind(), std::io::ErrorKind::TimedOut);
    let (text, took) = doctor_waits_for("doctor-silent", address);
    let found = format!("!!  {address} cannot be reached: {address}: connection timed out");
    let firewall = format!("-> a firewall must let TCP port {} through", address.port());
    assert!(text.contains(&found) && text.contains(&firewall), "{text}");
    assert!(text.contains("-> a relay listens only while its job runs"), "{text}");
    assert!(took > Duration::from_secs(4), "announced only {took:?} before the end");
    assert!(took < RELAY_WAIT, "{took:?}");
}

#[test]
fn doctor_gives_up_a_server_that_takes_a_connection_and_never_answers() {
    let mute = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = mute.local_addr().unwrap();
    let (text, took) = doctor_waits_for("doctor-mute", address);
    let found = format!("!!  {address} takes connections, and is no relay: it does not answer");
    assert!(text.contains(&found), "{text}");
    assert!(took < RELAY_WAIT, "{took:?}");
}

#[test]
fn doctor_gives_up_a_server_that_answers_byte_by_byte() {
    let slow = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = slow.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in slow.incoming().take(2) {
            std::thread::spawn(move || {
                // The head of a TLS message, and the beginning of the message.
                for byte in [22, 3, 3, 63, 0].into_iter().chain([2; 60]) {
                    if stream.as_ref().unwrap().write_all(&[byte]).is_err() {
                        break;
                    }
                    std::thread::sleep(Duration::from_millis(500));
                }
            });
        }
    });
    let (text, took) = doctor_waits_for("doctor-slow", address);
    assert!(text.contains(&format!("!!  {address} takes connections, and is no relay")), "{text}");
    assert!(took < RELAY_WAIT, "{took:?}");
}

#[test]
fn what_only_prints_ends_without_a_word_when_nobody_reads_on() {
    use std::os::unix::process::ExitStatusExt;
    let lb = Landbridge::new("reader-gone");
    lb.directory.write("liblandbridge-fi.so", "");
    for arguments in [&["doctor"][..], &["settings"], &["env", "--mpi", "mpich"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = lb.command(arguments).stdout(writer).output().unwrap();
        assert_eq!(
            (stderr(&output).as_str(), output.status.signal()),
            ("", Some(13)),
            "{arguments:?}"
        );
    }
}

#[test]
fn relay_and_lab_are_the_programs_beside_this_one() {
    let lb = Landbridge::new("siblings");
    lb.directory.write_script("landbridge-lab", "#!/bin/sh\necho lab \"$@\"; exit 7\n");
    let output = lb.run(&["lab", "run", "grid.toml", "--", "make", "--help"]);
    assert_code(&output, 7);
    assert_eq!(stdout(&output), "lab run grid.toml -- make --help\n");
    lb.directory.write_script("landbridge-relay", "#!/bin/sh\necho relay \"$@\"\n");
    let output = lb.run(&["relay", "--help"]);
    assert_code(&output, 0);
    assert_eq!(stdout(&output), "relay --help\n");
    std::fs::remove_file(lb.directory.0.join("landbridge-lab")).unwrap();
    let output = lb.run(&["lab"]);
    assert_code(&output, 1);
    assert!(stderr(&output).contains("landbridge-lab is missing"), "{}", stderr(&output));
}

#[test]
fn help_shows_examples() {
    let output = Landbridge::new("help").run(&["run", "--help"]);
    assert_code(&output, 0);
    for piece in ["Examples:", "--clusters 2", "--topology", "LANDBRIDGE_TOPOLOGY", "--ppn"] {
        assert!(stdout(&output).contains(piece), "{piece} in {}", stdout(&output));
    }
}
