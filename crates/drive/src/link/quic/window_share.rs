//! The windows of all connections of a relay, and each connection's share of them.
//!
//! What enters: connections that come and go, and bytes that are read from them. What leaves: the
//! window of each connection. The fewer connections there are, the wider the windows. A narrower
//! window does not take back what the other side may send already: these bytes are a debt, and no
//! other connection gets them before the debt is paid. What may never happen: all windows and debts
//! together exceed the common pool plus [`WINDOW_BYTES_MIN`] for each connection.

use std::cell::Cell;
use std::rc::Rc;

/// The window of one connection in bytes: what a receiver buffers out of order, and what a sender
/// keeps until it is acknowledged. 1 Gbit/s times 100 ms is 12.5 MB, and what follows a lost
/// datagram waits one more round trip for its retransmission.
pub const WINDOW_BYTES: u64 = 32 << 20;
/// The window that each connection has in any case, in bytes, also before its hello: enough for its
/// first round trips.
pub const WINDOW_BYTES_MIN: u64 = 512 << 10;
/// The bytes for all connections of a relay together, in each direction, in addition to the minimum
/// of each: enough for eight full windows.
pub const WINDOWS_BYTES_MAX: u64 = 256 << 20;
/// A window that cannot get all that it should get grows in steps of no less than this part of it.
const STEP_PART: u64 = 8;

const _: () = assert!(WINDOW_BYTES > 2 * 12_500_000 && WINDOWS_BYTES_MAX >= WINDOW_BYTES);

/// The common pool of all windows. Clones share one pool.
#[derive(Clone)]
pub struct WindowPool(Rc<Counts>);

struct Counts {
    bytes: u64,
    /// The bytes that connections have taken from the pool.
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

    /// The window of each connection if all windows are equal.
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

/// The share of one connection.
pub struct WindowShare {
    pool: WindowPool,
    window: u64,
    /// The bytes that the other side may send beyond the window.
    debt: u64,
}

impl WindowShare {
    pub fn new(pool: &WindowPool) -> Self {
        pool.0.shares.set(pool.0.shares.get() + 1);
        Self { pool: pool.clone(), window: WINDOW_BYTES_MIN, debt: 0 }
    }

    /// The bytes that the connection may keep for sending until they are acknowledged.
    pub fn sending(&self) -> u64 {
        self.pool.fair()
    }

    /// The new window, if it must change.
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

    /// Records that `bytes` bytes have been read from the connection. The other side does not get
    /// them as credit again before the debt is paid; quinn-proto accounts in the same way.
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
        // The first connection takes what is left, and others give back only when they are read.
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
