//! Tokens for eager bytes: how much a sender may send before anyone asked for it.
//!
//! A channel's receiver owns `window` tokens. A token is in exactly one place: with the sender
//! (available), under way or in the receiver's store of unexpected messages (used), or released and on its way
//! back in some frame's `credit`. Both counters run modulo 2^32 and are only ever compared by difference, so a
//! lost or repeated announcement is repaired by the next one.

/// The sender's side.
#[derive(Clone, Copy, Debug)]
pub struct Credit {
    window: u32,
    used: u32,
    released: u32,
}

/// The receiver's side.
#[derive(Clone, Copy, Debug, Default)]
pub struct GrantedCredit {
    taken: u32,
    released: u32,
    advertised: u32,
}

impl Credit {
    /// All `window` tokens available.
    pub fn new(window: u32) -> Self {
        Self { window, used: 0, released: 0 }
    }

    /// The receiver owns `window` tokens after all. No effect once any has been used: it counts with what it said first.
    pub fn set_window(&mut self, window: u32) {
        if (self.used, self.released) == (0, 0) {
            self.window = window;
        }
    }

    /// Bytes that may be sent now.
    #[inline]
    pub fn available(&self) -> u32 {
        self.window - self.used.wrapping_sub(self.released)
    }

    /// Sends `bytes`.
    ///
    /// # Panics
    /// If they are more than [`Self::available`].
    #[inline]
    pub fn spend(&mut self, bytes: u32) {
        assert!(bytes <= self.available(), "eager bytes without credit");
        self.used = self.used.wrapping_add(bytes);
    }

    /// Takes in the receiver's counter. A counter that would release more than was used is not believed.
    #[inline]
    pub fn handle_released(&mut self, released: u32) {
        let gain = released.wrapping_sub(self.released);
        if gain <= self.used.wrapping_sub(self.released) {
            self.released = released;
        }
    }
}

impl GrantedCredit {
    /// Takes in `bytes` that were sent on credit; false if the sender had no tokens for them out of `window`.
    #[inline]
    pub fn take(&mut self, bytes: u64, window: u32) -> bool {
        let room = window.saturating_sub(self.taken.wrapping_sub(self.released));
        let has_tokens = bytes <= room as u64;
        if has_tokens {
            self.taken = self.taken.wrapping_add(bytes as u32);
        }
        has_tokens
    }

    /// Gives `bytes` back.
    #[inline]
    pub fn release(&mut self, bytes: u32) {
        self.released = self.released.wrapping_add(bytes);
    }

    /// The counter for the next frame, which is about to be sent.
    #[inline]
    pub fn advertise(&mut self) -> u32 {
        self.advertised = self.released;
        self.released
    }

    /// Bytes released and not yet advertised.
    #[inline]
    pub fn unadvertised(&self) -> u32 {
        self.released.wrapping_sub(self.advertised)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_return_and_wrap() {
        let (mut credit, mut granted_credit) = (Credit::new(100), GrantedCredit::default());
        for _ in 0..100_000 {
            credit.spend(90_u32.min(credit.available()));
            assert!(granted_credit.take(90, 100) && !granted_credit.take(11, 100));
            granted_credit.release(90);
            assert_eq!(credit.available(), 10);
            credit.handle_released(granted_credit.advertise());
            assert_eq!((credit.available(), granted_credit.unadvertised()), (100, 0));
        }
        credit.used = u32::MAX - 10;
        credit.released = u32::MAX - 10;
        credit.spend(60);
        credit.handle_released((u32::MAX - 10).wrapping_add(60));
        assert_eq!(credit.available(), 100);
    }

    #[test]
    fn a_window_is_fixed_once_it_is_used() {
        let mut credit = Credit::new(100);
        credit.set_window(40);
        assert_eq!(credit.available(), 40);
        credit.spend(30);
        credit.set_window(20);
        assert_eq!(credit.available(), 10);
    }

    #[test]
    fn an_incredible_counter_is_not_believed() {
        let mut credit = Credit::new(100);
        credit.spend(10);
        credit.handle_released(50);
        assert_eq!(credit.available(), 90);
    }
}
