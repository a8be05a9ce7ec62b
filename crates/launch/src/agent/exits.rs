//! Reaps child processes in the order in which they end. Waiting for any child (waitpid(2)) returns
//! children in the order in which they were started: that would report a killed rank only after a
//! rank of a lower number that died of the loss. The kernel queues process descriptors (pidfds) in
//! an epoll instance as the processes end.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::ending::Ending;
use crate::sys::{self, Reaped};

/// Processes taken from the kernel's queue with one call; the rest stay in order.
const BATCH: usize = 64;

/// The watched children. Without process descriptors (Linux before 5.3) every end is still
/// reported, but in no particular order.
pub struct Exits {
    queue: Option<OwnedFd>,
    /// Process descriptors by process id.
    watched: BTreeMap<u32, OwnedFd>,
}

/// The end of a child.
#[derive(Clone, Copy, Debug)]
pub struct Exit {
    pub pid: u32,
    pub ending: Ending,
    /// Bytes that its first thread had written to files and pipes in all. `None`: this kernel does
    /// not count them (`CONFIG_TASK_IO_ACCOUNTING`), or counts more than what the program wrote.
    pub written: Option<u64>,
}

impl Exits {
    pub fn new() -> Exits {
        Exits { queue: epoll::create(CreateFlags::CLOEXEC).ok(), watched: BTreeMap::new() }
    }

    /// Adds a child to the queue. The child must not have been reaped.
    pub fn watch(&mut self, pid: u32) {
        let Some(queue) = &self.queue else { return };
        let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let Some(Ok(fd)) = raw.map(|pid| pidfd_open(pid, PidfdFlags::empty())) else { return };
        let data = EventData::new_u64(u64::from(pid));
        if epoll::add(queue, &fd, data, EventFlags::IN).is_ok() {
            self.watched.insert(pid, fd);
        }
    }

    /// Reaps children that have ended since the last call: the watched children in order, then the
    /// others. Calls `announce` with each one's process id, which exists until it returns.
    pub fn reap(&mut self, announce: &dyn Fn(u32)) -> Vec<Exit> {
        let mut ended = Vec::new();
        let mut passed_over = None;
        let reap = |pid| {
            announce(pid);
            reap(pid)
        };
        loop {
            self.reap_watched(&reap, &mut ended);
            // A watched child that ends during this search stays for its turn in the queue.
            let Some(pid) = sys::ended_child() else { return ended };
            if !self.watched.contains_key(&pid) {
                ended.extend(reap(pid));
            } else if passed_over.replace(pid) == Some(pid) {
                // The queue should have returned this child; reporting the child out of order is
                // better than never.
                self.watched.remove(&pid);
            }
        }
    }

    fn reap_watched(&mut self, reap: &dyn Fn(u32) -> Option<Exit>, ended: &mut Vec<Exit>) {
        loop {
            let pids = self.queued();
            let before = ended.len();
            for pid in pids {
                if let Some(exit) = reap(pid) {
                    // Closing the process descriptor removes it from the queue.
                    self.watched.remove(&pid);
                    ended.push(exit);
                }
            }
            if ended.len() == before {
                return;
            }
        }
    }

    fn queued(&self) -> Vec<u32> {
        let Some(queue) = &self.queue else { return Vec::new() };
        let mut events = Vec::with_capacity(BATCH);
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        if epoll::wait(queue, rustix::buffer::spare_capacity(&mut events), Some(&now)).is_err() {
            return Vec::new();
        }
        let pids = events.iter().map(|event: &epoll::Event| event.data.u64());
        pids.filter_map(|pid| u32::try_from(pid).ok()).collect()
    }
}

/// Reaps the child if it has ended. Its counters exist until then.
fn reap(pid: u32) -> Option<Exit> {
    let written = written_bytes(pid);
    let Reaped { pid, ending, has_dumped } = sys::reap(pid)?;
    // The thread of the dead process has written its core as well, or its line in the accounts of
    // processes (acct(2)).
    let is_sudden = matches!(ending, Ending::Killed(_));
    let is_exact = !(has_dumped || is_sudden && adds_to_ended());
    Some(Exit { pid, ending, written: written.filter(|_| is_exact) })
}

/// Whether the kernel writes something in the name of a process that ends: a child that has written
/// nothing shows it.
fn adds_to_ended() -> bool {
    let Some(child) = sys::child_that_ends() else { return true };
    let written = written_bytes(child);
    sys::bury(child);
    written != Some(0)
}

/// Bytes that the first thread of a process has written (`wchar` of `proc_pid_io(5)`).
fn written_bytes(pid: u32) -> Option<u64> {
    // In a container `/proc` may show the process ids of another pid namespace.
    let own = std::fs::read_link("/proc/self").ok()?;
    if own.to_str() != Some(std::process::id().to_string().as_str()) {
        return None;
    }
    let counters = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/io")).ok()?;
    let line = counters.lines().find_map(|line| line.strip_prefix("wchar: "))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    use super::*;

    /// A child that ends with this code when its stdin ends.
    fn start(code: u32) -> Child {
        start_script(&format!("read -r line; exit {code}"))
    }

    fn start_script(script: &str) -> Child {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::piped());
        command.spawn().unwrap()
    }

    fn is_zombie(pid: u32) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.rsplit_once(')').unwrap().1.trim_start().starts_with('Z')
    }

    #[test]
    fn processes_are_given_out_in_the_order_in_which_they_end() {
        let _alone = sys::children();
        let mut exits = Exits::new();
        let mut children: Vec<Child> = (0..5).map(start).collect();
        let pids: Vec<u32> = children.iter().map(Child::id).collect();
        // The child in the middle is not watched.
        [0, 1, 3, 4].iter().for_each(|&index: &usize| exits.watch(pids[index]));
        assert!(exits.reap(&|_| ()).is_empty());
        for index in [3, 1, 2, 4, 0] {
            drop(children[index].stdin.take());
            let deadline = Instant::now() + Duration::from_secs(60);
            while !is_zombie(pids[index]) {
                assert!(Instant::now() < deadline, "it did not end");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let ended = exits.reap(&|_| ()).into_iter().map(|exit| (exit.pid, exit.ending));
        let expected = [3, 1, 4, 0, 2].map(|index| (pids[index], Ending::Exited(index as i32)));
        assert!(ended.eq(expected));
        assert!(exits.watched.is_empty() && exits.reap(&|_| ()).is_empty());
    }

    #[test]
    fn an_exit_tells_how_much_the_child_had_written() {
        let _alone = sys::children();
        let mut exits = Exits::new();
        let mut child = start_script("printf 12345 > /dev/null; read -r line; kill -9 $$");
        exits.watch(child.id());
        drop(child.stdin.take());
        while !is_zombie(child.id()) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let announced = Cell::new(None);
        let announce = |pid| announced.set(is_zombie(pid).then_some(pid));
        let [exit] = exits.reap(&announce)[..] else { panic!("there is one child") };
        assert_eq!(announced.get(), Some(child.id()), "announced while its process id exists");
        assert_eq!((exit.pid, exit.ending), (child.id(), Ending::Killed(libc::SIGKILL)));
        let counts = std::path::Path::new("/proc/self/io").exists();
        assert_eq!(exit.written, counts.then_some(5));
        assert!(child.wait().is_err(), "it has been reaped");
    }
}
