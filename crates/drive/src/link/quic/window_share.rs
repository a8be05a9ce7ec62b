//! What the connections of a relay may keep together, and what each of them has of that.
//!
//! What enters: connections that come and go, and bytes that are taken out of them. What leaves: the window of each. The
//! fewer there are, the wider. A window that is made narrower does not take back what the other side may send already: that
//! is a debt, and nobody else has it before it is paid. What may never happen: all windows and debts together exceed what
//! there is for all, and [`WINDOW_BYTES_MIN`] for each.

use std::cell::Cell;
use std::rc::Rc;

/// Bytes of one connection that a receiver has room for out of their order, and a sender keeps until they are confirmed:
/// 1 Gb/s times 100 ms is 12.5 MB, and what comes behind a lost datagram waits one more round trip for it.
pub const WINDOW_BYTES: u64 = 32 << 20;
/// Each connection has so much, also before it has shown that it is welcome: enough for its first round trips.
pub const WINDOW_BYTES_MIN: u64 = 512 << 10;
/// Bytes for all connections of a relay together, in each direction, beyond what each has in any case: eight of them are
/// as wide as one.
pub const WINDOWS_BYTES_MAX: u64 = 256 << 20;
/// A window that cannot have all that it is to have gets wider in steps of no less than this part of it.
const STEP_PART: u64 = 8;

const _: () = assert!(WINDOW_BYTES > 2 * 12_500_000 && WINDOWS_BYTES_MAX >= WINDOW_BYTES);

/// What there is for all. Clones are the same.
#[derive(Clone)]
pub struct WindowPool(Rc<Counts>);

struct Counts {
    bytes: u64,
    /// Of those, what connections have.
    taken: Cell<u64>,
    shares: Cell<u64>,
}

impl Default for WindowPool {
    fn default() -> Self {
        Self::new(WINDOWS_BYTES_MAX)
    }
}

impl WindowPool {
    pub fn new(bytes: u64) -> Self {
        Self(Rc::new(Counts { bytes, taken: Cell::new(0), shares: Cell::new(0) }))
    }

    /// The window of each if all have the same.
    fn fair(&self) -> u64 {
        let part = self.0.bytes / self.0.shares.get().max(1);
        (WINDOW_BYTES_MIN + part).min(WINDOW_BYTES)
    }

    fn left(&self) -> u64 {
        self.0.bytes - self.0.taken.get()
    }

    fn take(&self, bytes: u64) {
        self.0.taken.set(self.0.taken.get() + bytes);
    }

    fn give_back(&self, bytes: u64) {
        self.0.taken.set(self.0.taken.get() - bytes);
    }
}

/// What one connection has.
pub struct WindowShare {
    pool: WindowPool,
    window: u64,
    /// What the other side may send beyond the window.
    debt: u64,
}

impl WindowShare {
    pub fn new(pool: &WindowPool) -> Self {
        pool.0.shares.set(pool.0.shares.get() + 1);
        Self { pool: pool.clone(), window: WINDOW_BYTES_MIN, debt: 0 }
    }

    /// What it may keep of its own until that is confirmed.
    pub fn sending(&self) -> u64 {
        self.pool.fair()
    }

    /// The window from now on, if it is to be another one.
    pub fn adjust(&mut self) -> Option<u64> {
        let fair = self.pool.fair();
        if fair < self.window {
            self.debt += self.window - fair;
        } else {
            let wanted = fair - self.window;
            let more = wanted.min(self.pool.left());
            if more == 0 || (more < wanted && more < self.window / STEP_PART) {
                return None;
            }
            self.pool.take(more);
            return Some(self.set(self.window + more));
        }
        Some(self.set(fair))
    }

    fn set(&mut self, window: u64) -> u64 {
        self.window = window;
        window
    }

    /// So much has been taken out of what the connection kept. The other side does not get it again before the debt is
    /// paid: so quinn-proto does it, too.
    pub fn note_read(&mut self, bytes: u64) {
        let paid = self.debt.min(bytes);
        self.debt -= paid;
        self.pool.give_back(paid);
    }
}

impl Drop for WindowShare {
    fn drop(&mut self) {
        self.pool.give_back(self.window - WINDOW_BYTES_MIN + self.debt);
        self.pool.0.shares.set(self.pool.0.shares.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settle(shares: &mut [WindowShare]) {
        // Whoever comes first takes, and others give back only when they are read.
        for _ in 0..2 {
            for share in shares.iter_mut() {
                share.adjust();
                share.note_read(WINDOW_BYTES);
            }
        }
    }

    fn held(shares: &[WindowShare]) -> u64 {
        shares.iter().map(|share| share.window + share.debt).sum()
    }

    #[test]
    fn one_connection_is_as_wide_as_a_long_line_needs() {
        let pool = WindowPool::default();
        let mut share = WindowShare::new(&pool);
        assert_eq!(share.adjust(), Some(WINDOW_BYTES));
        assert_eq!(share.adjust(), None);
        assert_eq!(share.sending(), WINDOW_BYTES);
    }

    #[test]
    fn many_share_alike_and_those_that_stay_have_what_others_leave() {
        let pool = WindowPool::default();
        let mut shares: Vec<_> = (0..64).map(|_| WindowShare::new(&pool)).collect();
        settle(&mut shares);
        for share in &shares {
            assert_eq!(share.window, WINDOW_BYTES_MIN + WINDOWS_BYTES_MAX / 64);
        }
        shares.truncate(2);
        settle(&mut shares);
        assert!(shares.iter().all(|share| share.window == WINDOW_BYTES));
        drop(shares);
        assert_eq!((pool.0.taken.get(), pool.0.shares.get()), (0, 0));
    }

    #[test]
    fn what_was_promised_to_one_is_promised_to_nobody_else() {
        let pool = WindowPool::default();
        let mut shares = Vec::new();
        for count in 1..200 {
            shares.push(WindowShare::new(&pool));
            // Nobody reads.
            for share in &mut shares {
                share.adjust();
            }
            assert!(held(&shares) <= WINDOWS_BYTES_MAX + count * WINDOW_BYTES_MIN);
            assert_eq!(held(&shares), pool.0.taken.get() + count * WINDOW_BYTES_MIN);
        }
        assert_eq!(shares[199 - 1].window, WINDOW_BYTES_MIN, "all there was has been promised");
        settle(&mut shares);
        assert!(shares[199 - 1].window > 2 * WINDOW_BYTES_MIN);
        assert!(held(&shares) <= WINDOWS_BYTES_MAX + 199 * WINDOW_BYTES_MIN);
    }
}
