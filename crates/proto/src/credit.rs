//! Tokens for eager bytes: how many bytes a sender may send without a grant of the receiver.
//!
//! A channel's receiver owns `window` tokens. A token is in exactly one place: with the sender
//! (available), in flight or in the receiver's store of unexpected messages (used), or released and
//! on its way back in the `credit` field of a frame. Both counters run modulo 2^32 and are compared
//! only by their difference, so the next frame repairs a lost or repeated counter.

/// The sender's side of the tokens of one channel.
#[derive(Clone, Copy, Debug)]
pub struct Credit {
    window: u32,
    used: u32,
    released: u32,
}

/// The receiver's side of the tokens of one channel.
#[derive(Clone, Copy, Debug)]
pub struct GrantedCredit {
    window: u32,
    taken: u32,
    released: u32,
    advertised: u32,
}

impl Credit {
    /// The sender's side with all `window` tokens available.
    pub fn new(window: u32) -> Self {
        Self { window, used: 0, released: 0 }
    }

    /// Sets the number of tokens that the receiver owns. No effect once a token has been used or
    /// released: the receiver then counts with its first number.
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

    /// Uses tokens for `bytes` bytes that are being sent.
    ///
    /// # Panics
    /// If `bytes` exceeds [`Self::available`].
    #[inline]
    pub fn spend(&mut self, bytes: u32) {
        assert!(bytes <= self.available(), "eager bytes without credit");
        self.used = self.used.wrapping_add(bytes);
    }

    /// Accepts the receiver's counter of released tokens. A counter that would release more tokens
    /// than were used is ignored.
    #[inline]
    pub fn handle_released(&mut self, released: u32) {
        let gain = released.wrapping_sub(self.released);
        if gain <= self.used.wrapping_sub(self.released) {
            self.released = released;
        }
    }
}

impl GrantedCredit {
    /// The receiver's side of `window` tokens.
    pub fn new(window: u32) -> Self {
        Self { window, taken: 0, released: 0, advertised: 0 }
    }

    /// Accepts `bytes` that were sent with tokens. Returns false if the sender had too few tokens.
    #[inline]
    pub fn take(&mut self, bytes: u64) -> bool {
        let room = self.window.saturating_sub(self.taken.wrapping_sub(self.released));
        let has_tokens = bytes <= room as u64;
        if has_tokens {
            self.taken = self.taken.wrapping_add(bytes as u32);
        }
        has_tokens
    }

    /// Releases the tokens of `bytes` bytes.
    #[inline]
    pub fn release(&mut self, bytes: u32) {
        self.released = self.released.wrapping_add(bytes);
    }

    /// The counter of released tokens, for the frame that is about to be sent.
    #[inline]
    pub fn advertise(&mut self) -> u32 {
        self.advertised = self.released;
        self.released
    }

    /// Whether so many released tokens wait for a frame that one must be sent for their sake.
    #[inline]
    pub fn is_half_unadvertised(&self) -> bool {
        self.unadvertised() >= (self.window / 2).max(1)
    }

    /// Released tokens that no frame has carried yet, in bytes.
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
        let (mut credit, mut granted_credit) = (Credit::new(100), GrantedCredit::new(100));
        for _ in 0..100_000 {
            credit.spend(90_u32.min(credit.available()));
            assert!(granted_credit.take(90) && !granted_credit.take(11));
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
