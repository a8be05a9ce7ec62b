//! The status line at the bottom of the terminal of a job with `--recover`: the state of the job in
//! a few words.
//!
//! The module is pure: counts, ages and sizes enter; text leaves. Unknown values are left out.

use std::time::Duration;

use crate::ps::paths::{bytes, counted};
use crate::ps::rank_table::{RankCounts, ReplayProgress};

/// Replaying ranks that are named at most; further ranks are counted.
const NAMED_MAX: usize = 3;

/// The values that are known.
#[derive(Debug, Default)]
pub struct StatusLine {
    pub counts: RankCounts,
    pub replaying: Vec<ReplayProgress>,
    /// Bytes of message logs that relays hold for the ranks, and how many of these bytes are on a
    /// disk.
    pub logged: Option<(u64, u64)>,
    /// Age of the youngest and of the oldest among the ranks' newest checkpoints.
    pub images: Option<(Duration, Duration)>,
}

impl StatusLine {
    pub fn text(&self) -> String {
        let RankCounts { running, restarting, restarts, .. } = self.counts;
        let mut text = format!("landbridge: {} up", counted(running as u64, "rank"));
        if restarting > 0 {
            text += &format!(", {restarting} restarting");
            text += &self.progress();
        }
        if restarts > 0 {
            text += &format!("; restarts: {restarts}");
        }
        if let Some((all, on_disk)) = self.logged {
            text += &format!("; logged {}", bytes(all));
            if on_disk > 0 {
                text += &format!(", {} of it on disk", bytes(on_disk));
            }
        }
        if let Some((youngest, oldest)) = self.images.map(|(a, b)| (a.as_secs(), b.as_secs())) {
            let age = if youngest == oldest { String::new() } else { format!("{youngest} to ") };
            text += &format!("; checkpoints {age}{oldest} s old");
        }
        text
    }

    fn progress(&self) -> String {
        let progress_text = |it: &ReplayProgress| {
            let percent = it.percent?;
            let rate = it.per_second.map_or(String::new(), |rate| format!(", {rate:.0} %/s"));
            Some(format!("rank {}: {percent} %{rate}", it.rank))
        };
        let mut all: Vec<String> = self.replaying.iter().filter_map(progress_text).collect();
        let others = all.len().saturating_sub(NAMED_MAX);
        all.truncate(NAMED_MAX);
        if others > 0 {
            all.push(format!("{others} more"));
        }
        if all.is_empty() { String::new() } else { format!(" ({})", all.join("; ")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_line_has_only_what_is_known() {
        let counts = RankCounts { running: 4, ..RankCounts::default() };
        let mut status_line = StatusLine { counts, ..StatusLine::default() };
        assert_eq!(status_line.text(), "landbridge: 4 ranks up");
        status_line.counts.running = 1;
        assert_eq!(status_line.text(), "landbridge: 1 rank up");
        status_line.counts.running = 4;
        status_line.logged = Some((1_500_000, 0));
        let seconds = Duration::from_secs;
        status_line.images = Some((seconds(3), seconds(3)));
        let expected = "landbridge: 4 ranks up; logged 1.50 MB; checkpoints 3 s old";
        assert_eq!(status_line.text(), expected);
        status_line.counts = RankCounts { running: 3, restarting: 1, restarts: 2, ended: 0 };
        let of = |rank, percent, per_second| ReplayProgress { rank, percent, per_second };
        status_line.replaying = vec![of(2, None, None)];
        (status_line.logged, status_line.images) =
            (Some((2_000, 1_000)), Some((seconds(3), seconds(9))));
        let expected = "landbridge: 3 ranks up, 1 restarting; restarts: 2; logged 2.00 kB, 1.00 kB \
                        of it on disk; checkpoints 3 to 9 s old";
        assert_eq!(status_line.text(), expected);
        status_line.replaying = vec![of(2, Some(43), Some(20.6)), of(3, Some(0), None)];
        assert!(
            status_line
                .text()
                .contains(" restarting (rank 2: 43 %, 21 %/s; rank 3: 0 %); restarts")
        );
        status_line.replaying = (0..5).map(|rank| of(rank, Some(1), None)).collect();
        assert!(status_line.text().contains("(rank 0: 1 %; rank 1: 1 %; rank 2: 1 %; 2 more)"));
    }
}
