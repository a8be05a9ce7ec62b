//! The event loop between the TUN devices and the emulator: one thread, which sleeps while no
//! packet is due.
//!
//! The thread wakes when a device has packets, when a packet is due (to the nanosecond in the
//! request; the kernel's wake-up adds tens of microseconds), or when another thread makes a request
//! (`Handle::ask`). Packets that are due leave before new packets are read. While many packets are
//! under way the thread wakes at most once per `TICK`: packets are late by at most `TICK`, but not
//! every packet costs its sender and its receiver a wake-up.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc;
use std::time::Instant;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::emulator::Emulator;
use super::link::Nanos;
use super::packet::PACKET_BYTES_MAX;
use super::tun::Tun;

/// Packets read from one device before other devices are read and due packets leave: at 64 KiB
/// each, this bounds the delay that one busy device causes to about 100 us.
const READS_PER_TURN: usize = 16;

/// Minimum time between two wake-ups while many packets are under way, in nanoseconds. A wake-up
/// across cores costs up to 30 us on virtual machines; a packet of 1,500 bytes at 1 Gbit/s takes 12
/// us.
const TICK: Nanos = 50_000;

/// Packets under way above which wake-ups are coalesced: more than programs that wait for each
/// other's messages have under way, and far fewer than a stream of datagrams has.
const COALESCE_ABOVE: usize = 64;

/// Work for the pump's thread from other threads.
pub type Request = Box<dyn FnOnce(&mut Emulator) + Send>;

/// The emulator and its devices.
pub struct Pump {
    emulator: Emulator,
    devices: Vec<Tun>,
    requests: mpsc::Receiver<Request>,
    wake: OwnedFd,
    began: Instant,
}

/// A handle by which other threads send requests to a pump.
pub struct Handle {
    requests: mpsc::Sender<Request>,
    wake: OwnedFd,
}

impl Handle {
    /// Runs `work` on the emulator between two packets and returns its result; `None` if the pump
    /// has ended.
    pub fn ask<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Emulator) -> T + Send + 'static,
    ) -> Option<T> {
        let (sender, receiver) = mpsc::channel();
        let request: Request = Box::new(move |emulator| {
            // The requesting thread may have ended; then the answer is dropped.
            let _ = sender.send(work(emulator));
        });
        self.requests.send(request).ok()?;
        rustix::io::write(&self.wake, &1u64.to_ne_bytes()).ok()?;
        receiver.recv().ok()
    }
}

impl Pump {
    /// Makes a pump. `devices` are the devices that `Emulator::new` requested, in the same order.
    pub fn new(emulator: Emulator, devices: Vec<Tun>) -> io::Result<(Pump, Handle)> {
        let (sender, receiver) = mpsc::channel();
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let handle = Handle { requests: sender, wake: wake.try_clone()? };
        let pump = Pump { emulator, devices, requests: receiver, wake, began: Instant::now() };
        Ok((pump, handle))
    }

    /// Carries packets until the process ends; returns only on an error of the kernel.
    pub fn run(mut self) -> io::Error {
        raise_priority();
        let mut scratch = vec![0; PACKET_BYTES_MAX];
        let mut ready = vec![false; self.devices.len()];
        let mut woken = 0;
        loop {
            self.deliver();
            self.coalesce_wakeups(woken);
            if let Err(error) = self.wait(&mut ready) {
                return error;
            }
            woken = self.now();
            self.deliver();
            for device in (0..ready.len()).filter(|&device| ready[device]) {
                self.read_device(device, &mut scratch);
                self.deliver();
            }
        }
    }

    fn coalesce_wakeups(&self, woken: Nanos) {
        let rest = (woken + TICK).saturating_sub(self.now());
        if rest > 0 && self.emulator.in_flight() > COALESCE_ABOVE {
            // A signal may shorten the sleep.
            let _ = rustix::thread::nanosleep(&timespec(rest));
        }
    }

    fn now(&self) -> Nanos {
        // 64 bits of nanoseconds last for 584 years.
        self.began.elapsed().as_nanos() as Nanos
    }

    fn deliver(&mut self) {
        while let Some((device, packet)) = self.emulator.poll_output(self.now()) {
            // A device that refuses a packet loses the packet, as an interface that is down does.
            let _ = self.devices[device].write(&packet);
        }
    }

    fn read_device(&mut self, device: usize, scratch: &mut [u8]) {
        for _ in 0..READS_PER_TURN {
            // A read error means that the interface is down; the device is polled again later.
            let Ok(Some(packet)) = self.devices[device].read(scratch) else { return };
            self.emulator.handle_packet(self.now(), device, packet);
        }
    }

    /// Sleeps until a packet is due or a descriptor is ready, marks the ready devices in `ready`,
    /// and serves requests.
    fn wait(&mut self, ready: &mut [bool]) -> io::Result<()> {
        let timeout = self.emulator.next_output().map(|at| timespec(at.saturating_sub(self.now())));
        let mut fds: Vec<PollFd<'_>> =
            self.devices.iter().map(|device| PollFd::new(device, PollFlags::IN)).collect();
        fds.push(PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN));
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        for (ready, fd) in ready.iter_mut().zip(&fds) {
            *ready = fd.revents().contains(PollFlags::IN);
        }
        let is_asked = fds.last().is_some_and(|fd| !fd.revents().is_empty());
        drop(fds);
        if is_asked {
            self.serve_requests();
        }
        Ok(())
    }

    fn serve_requests(&mut self) {
        let mut count = [0; 8];
        // The read only resets the event; requests are in the channel.
        let _ = rustix::io::read(&self.wake, &mut count);
        while let Ok(request) = self.requests.try_recv() {
            request(&mut self.emulator);
        }
    }
}

/// Sets timers with nanosecond precision, and a real-time priority: busy programs at a link's ends
/// do not slow the link down. The thread does a bounded amount of work per packet and otherwise
/// sleeps, so no other thread starves. Without the privilege, the scheduler determines the
/// precision of links.
fn raise_priority() {
    const TIMER_SLACK_NANOS: libc::c_ulong = 1;
    let priority = libc::sched_param { sched_priority: 1 };
    // SAFETY: both calls take plain values and a pointer that is valid during the call; a failure
    // changes nothing.
    unsafe {
        libc::prctl(libc::PR_SET_TIMERSLACK, TIMER_SLACK_NANOS);
        libc::sched_setscheduler(
            0,
            libc::SCHED_RR | libc::SCHED_RESET_ON_FORK,
            &raw const priority,
        );
    }
}

fn timespec(nanos: Nanos) -> Timespec {
    Timespec { tv_sec: (nanos / 1_000_000_000) as i64, tv_nsec: (nanos % 1_000_000_000) as _ }
}
