//! Chooses who logs the messages of ranks that may be restarted (setting `recover_log`): their
//! senders, or the relay of the receiver.
//!
//! In: the setting, and what the job needs. Out: one answer for the whole job, because its ranks,
//! agents and relays must agree.
//!
//! What may never happen: senders log in a job whose ranks may begin again from something that
//! their logs do not cover.

use anyhow::{Result, bail};
use landbridge_proto::log::layout::LOGGED_PROCESSES_MAX;

/// The most ranks of a job whose senders log messages by default: processes that are spawned later
/// have logs, too.
pub const SENDER_LOG_RANKS_MAX: u32 = LOGGED_PROCESSES_MAX as u32 / 2;

/// What decides who logs messages.
#[derive(Debug, Clone, Copy)]
pub struct LogWishes<'a> {
    /// The text of the setting `recover_log`.
    pub log: &'a str,
    /// The text of the setting `recover_unit`.
    pub unit: &'a str,
    pub ranks: u32,
    /// A spare node may take the ranks of a lost one.
    pub has_spares: bool,
    /// Polls are counted (`recover_clocks`).
    pub records_clocks: bool,
    /// This system limits the address space of processes (`ulimit -v`), or the size of files
    /// (`ulimit -f`).
    pub has_limits: bool,
}

/// The value of `recover_log` for the job: `sender` or `relay`.
///
/// # Errors
/// The user wants `sender`, and the job needs something that only `relay` can do; or wants
/// `recover_unit=node`, which does not go with what else is wanted.
pub fn choose(wishes: LogWishes<'_>) -> Result<&'static str> {
    match wishes.log {
        "relay" if wishes.unit == "node" => {
            bail!("recover_unit=node needs recover_log=sender: leave one of the two settings out")
        }
        "auto" if wishes.unit == "node" => check(wishes).map(|()| "sender"),
        "relay" => Ok("relay"),
        "sender" => check(wishes).map(|()| "sender"),
        _ => {
            let is_small = wishes.ranks <= SENDER_LOG_RANKS_MAX;
            let fits = is_small && !wishes.has_limits;
            Ok(if fits && check(wishes).is_ok() { "sender" } else { "relay" })
        }
    }
}

fn check(wishes: LogWishes<'_>) -> Result<()> {
    if wishes.unit == "node" && wishes.has_spares {
        bail!("recover_unit=node does not go with spare nodes yet: leave --spares out");
    }
    if wishes.ranks as usize > LOGGED_PROCESSES_MAX {
        bail!(
            "recover_log=sender works with at most {LOGGED_PROCESSES_MAX} ranks: use \
             recover_log=relay"
        );
    }
    if wishes.has_spares && !wishes.records_clocks {
        bail!("recover_log=sender with spare nodes needs recover_clocks=on: use recover_log=relay");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: LogWishes<'_> = LogWishes {
        log: "auto",
        unit: "process",
        ranks: 4,
        has_spares: false,
        records_clocks: true,
        has_limits: false,
    };

    /// Jobs that need what only a relay can do.
    const NEEDY: [LogWishes<'_>; 2] = [
        LogWishes { has_spares: true, records_clocks: false, ..PLAIN },
        LogWishes { ranks: LOGGED_PROCESSES_MAX as u32 + 1, ..PLAIN },
    ];

    #[test]
    fn senders_log_where_they_can() {
        assert_eq!(choose(PLAIN).unwrap(), "sender");
        assert_eq!(choose(LogWishes { ranks: SENDER_LOG_RANKS_MAX, ..PLAIN }).unwrap(), "sender");
        for wishes in NEEDY {
            assert_eq!(choose(wishes).unwrap(), "relay", "{wishes:?}");
        }
        let many = LogWishes { ranks: SENDER_LOG_RANKS_MAX + 1, ..PLAIN };
        let limited = LogWishes { has_limits: true, ..PLAIN };
        let moving = LogWishes { has_spares: true, ..PLAIN };
        assert_eq!(choose(moving).unwrap(), "sender");
        for wishes in [many, limited] {
            assert_eq!(choose(wishes).unwrap(), "relay", "{wishes:?}");
            assert_eq!(choose(LogWishes { log: "sender", ..wishes }).unwrap(), "sender");
        }
    }

    #[test]
    fn nodes_begin_again_together_where_senders_log() {
        let node = LogWishes { unit: "node", ..PLAIN };
        for log in ["auto", "sender"] {
            assert_eq!(choose(LogWishes { log, has_limits: true, ..node }).unwrap(), "sender");
            let refused = choose(LogWishes { log, has_spares: true, ..node }).unwrap_err();
            assert!(refused.to_string().contains("leave --spares out"), "{refused}");
        }
        assert!(choose(LogWishes { log: "relay", ..node }).is_err());
    }

    #[test]
    fn what_the_user_wants_is_done_or_refused() {
        assert_eq!(choose(LogWishes { log: "sender", ..PLAIN }).unwrap(), "sender");
        assert_eq!(choose(LogWishes { log: "relay", ..PLAIN }).unwrap(), "relay");
        for wishes in NEEDY {
            let refused = choose(LogWishes { log: "sender", ..wishes }).unwrap_err().to_string();
            assert!(refused.contains("use recover_log=relay"), "{refused}");
            assert_eq!(choose(LogWishes { log: "relay", ..wishes }).unwrap(), "relay");
        }
    }
}
