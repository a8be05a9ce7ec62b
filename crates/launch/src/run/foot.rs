//! The line at the foot of the terminal while ranks that are killed come back: how the job stands, in a few words.
//!
//! Pure. Counts, ages and sizes enter; text leaves. What nobody knows is left out.

use std::time::Duration;

use crate::ps::paths::{bytes, counted};
use crate::ps::roll::{Counts, Progress};

/// Ranks on their way back that are named; of more than that the others are counted.
const NAMED_MAX: usize = 3;

/// What is known.
#[derive(Debug, Default)]
pub struct Standing {
    pub counts: Counts,
    pub coming_back: Vec<Progress>,
    /// Bytes that relays keep of the ranks, and how many of these are on a disk.
    pub kept: Option<(u64, u64)>,
    /// Age of the youngest and the oldest of the ranks' newest images.
    pub images: Option<(Duration, Duration)>,
}

impl Standing {
    pub fn text(&self) -> String {
        let Counts { running, starting_anew, restarts, .. } = self.counts;
        let mut text = format!("landbridge: {} up", counted(running as u64, "rank"));
        if starting_anew > 0 {
            text += &format!(", {starting_anew} coming back");
            text += &self.progress();
        }
        if restarts > 0 {
            text += &format!("; new starts: {restarts}");
        }
        if let Some((all, on_disk)) = self.kept {
            text += &format!("; kept {}", bytes(all));
            if on_disk > 0 {
                text += &format!(", {} of it on disk", bytes(on_disk));
            }
        }
        if let Some((youngest, oldest)) = self.images.map(|(a, b)| (a.as_secs(), b.as_secs())) {
            let age = if youngest == oldest { String::new() } else { format!("{youngest} to ") };
            text += &format!("; images {age}{oldest} s old");
        }
        text
    }

    fn progress(&self) -> String {
        let told = |it: &Progress| {
            let percent = it.percent?;
            let rate = it.per_second.map_or(String::new(), |rate| format!(", {rate:.0} %/s"));
            Some(format!("rank {}: {percent} %{rate}", it.rank))
        };
        let mut all: Vec<String> = self.coming_back.iter().filter_map(told).collect();
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
    fn what_is_known_is_said_and_nothing_else() {
        let counts = Counts { running: 4, ..Counts::default() };
        let mut standing = Standing { counts, ..Standing::default() };
        assert_eq!(standing.text(), "landbridge: 4 ranks up");
        standing.counts.running = 1;
        assert_eq!(standing.text(), "landbridge: 1 rank up");
        standing.counts.running = 4;
        standing.kept = Some((1_500_000, 0));
        let seconds = Duration::from_secs;
        standing.images = Some((seconds(3), seconds(3)));
        let expected = "landbridge: 4 ranks up; kept 1.50 MB; images 3 s old";
        assert_eq!(standing.text(), expected);
        standing.counts = Counts { running: 3, starting_anew: 1, restarts: 2, ended: 0 };
        let of = |rank, percent, per_second| Progress { rank, percent, per_second };
        standing.coming_back = vec![of(2, None, None)];
        (standing.kept, standing.images) = (Some((2_000, 1_000)), Some((seconds(3), seconds(9))));
        let expected = "landbridge: 3 ranks up, 1 coming back; new starts: 2; kept 2.00 kB, 1.00 kB of it on disk; \
                        images 3 to 9 s old";
        assert_eq!(standing.text(), expected);
        standing.coming_back = vec![of(2, Some(43), Some(20.6)), of(3, Some(0), None)];
        assert!(standing.text().contains(" coming back (rank 2: 43 %, 21 %/s; rank 3: 0 %); new"));
        standing.coming_back = (0..5).map(|rank| of(rank, Some(1), None)).collect();
        assert!(standing.text().contains("(rank 0: 1 %; rank 1: 1 %; rank 2: 1 %; 2 more)"));
    }
}
