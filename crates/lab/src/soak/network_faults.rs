//! The faults of a soak: network faults of the lab, according to a schedule.
//!
//! A fault is counted once the lab has applied it. A fault that cannot happen at its time (of a
//! relay between two jobs) is skipped.

use std::time::Duration;

use super::run::{FaultInjector, SoakContext, seconds};
use super::schedule::{Fault, FaultSchedule};
use crate::net::control;

/// Injector of network faults.
pub struct NetworkFaults {
    faults: std::iter::Peekable<FaultSchedule>,
    active: Vec<Fault>,
    /// End of the soak: no fault begins after this time, and all faults end.
    time: Duration,
}

impl NetworkFaults {
    pub fn new(schedule: FaultSchedule, time: Duration) -> NetworkFaults {
        NetworkFaults { faults: schedule.peekable(), active: Vec::new(), time }
    }

    fn begin(&mut self, fault: Fault, context: &mut SoakContext) {
        let lasts = fault.until - fault.from;
        let (kind, place) = (fault.spec.kind, &fault.spec.location);
        match control::request(None, &fault.spec.begin) {
            Ok(_) => {
                let (number, what) = (fault.number, kind.what());
                context
                    .log_line(&format!("fault {number}: {place}: {what}, for {}", seconds(lasts)));
                context.tally.fault(kind.name(), lasts);
                self.active.push(fault);
            }
            Err(error) => context.log_line(&format!("fault {} left out: {error:#}", fault.number)),
        }
    }

    /// Ends the faults that are over at `now`; `None` ends all faults.
    fn heal(&mut self, now: Option<Duration>) {
        let is_over = |fault: &mut Fault| now.is_none_or(|now| fault.until <= now);
        for fault in self.active.extract_if(.., is_over).collect::<Vec<Fault>>() {
            // The relay may have ended with its job.
            let _ = control::request(None, &fault.spec.end);
        }
    }
}

impl FaultInjector for NetworkFaults {
    fn next_time(&mut self) -> Option<Duration> {
        let end = self.active.iter().map(|fault| fault.until).min();
        let next = self.faults.peek().map(|fault| fault.from);
        let to_heal = (!self.active.is_empty()).then_some(self.time);
        let next = next.filter(|from| *from < self.time).or(to_heal);
        end.into_iter().chain(next).min()
    }

    /// Ends the faults whose time is over, and begins the faults whose time has come.
    fn act(&mut self, now: Duration, context: &mut SoakContext) {
        self.heal((now < self.time).then_some(now));
        while let Some(fault) = self.faults.next_if(|fault| fault.from <= now) {
            if fault.from < self.time && fault.until > now {
                self.begin(fault, context);
            }
        }
    }

    fn end(&mut self) {
        self.heal(None);
    }
}
