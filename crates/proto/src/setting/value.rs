//! What a setting's text stands for.

use alloc::vec::Vec;
use core::net::IpAddr;
use core::time::Duration;

/// A setting that has been read. Which of these it is depends on the row's
/// [`SettingKind`](super::SettingKind) alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// Of [`SettingKind::Time`](super::SettingKind::Time).
    Time(Duration),
    /// Of [`SettingKind::Size`](super::SettingKind::Size), in bytes, and of [`SettingKind::Count`](super::SettingKind::Count).
    Number(u64),
    /// Of [`SettingKind::Switch`](super::SettingKind::Switch).
    Switch(bool),
    /// Of [`SettingKind::Choice`](super::SettingKind::Choice).
    Word(&'static str),
    /// Of [`SettingKind::Choices`](super::SettingKind::Choices), in the order of the row, each once.
    Words(Vec<&'static str>),
    /// Of [`SettingKind::Networks`](super::SettingKind::Networks). Two that hold every address stand for `auto`.
    Networks(Vec<Network>),
    /// Of [`SettingKind::Folder`](super::SettingKind::Folder), and of [`SettingKind::Text`](super::SettingKind::Text), which is not read here.
    Text,
}

impl Value {
    /// Of a time.
    pub fn duration(&self) -> Option<Duration> {
        if let Value::Time(time) = self { Some(*time) } else { None }
    }

    /// Of a size, in bytes, or a count.
    pub fn number(&self) -> Option<u64> {
        if let Value::Number(number) = self { Some(*number) } else { None }
    }

    /// Of a switch.
    pub fn is_on(&self) -> Option<bool> {
        if let Value::Switch(is_on) = self { Some(*is_on) } else { None }
    }

    /// Of a choice.
    pub fn word(&self) -> Option<&'static str> {
        if let Value::Word(word) = self { Some(word) } else { None }
    }

    /// Of choices.
    pub fn words(self) -> Option<Vec<&'static str>> {
        if let Value::Words(words) = self { Some(words) } else { None }
    }

    /// Of networks.
    pub fn networks(self) -> Option<Vec<Network>> {
        if let Value::Networks(networks) = self { Some(networks) } else { None }
    }
}

/// Addresses that begin alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    /// One of them.
    pub address: IpAddr,
    /// Leading bits they share: at most 32 or 128.
    pub bits: u8,
}

impl Network {
    /// Whether it is one of them.
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                let (own, other) = (u128::from(own.to_bits()), u128::from(other.to_bits()));
                agree(own << 96, other << 96, self.bits)
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => {
                agree(own.to_bits(), other.to_bits(), self.bits)
            }
            _ => false,
        }
    }
}

/// Whether the first `bits` are the same.
fn agree(one: u128, other: u128, bits: u8) -> bool {
    (one ^ other).leading_zeros() >= u32::from(bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_holds_what_begins_alike() {
        let rows = [
            ("10.1.2.3", 8, "10.9.9.9", true),
            ("10.1.2.3", 8, "11.1.2.3", false),
            ("10.1.2.3", 32, "10.1.2.3", true),
            ("10.1.2.3", 32, "10.1.2.2", false),
            ("0.0.0.0", 0, "255.1.2.3", true),
            ("0.0.0.0", 0, "fd00::1", false),
            ("fd00::", 16, "fd00:1::1", true),
            ("fd00::", 16, "fd01::1", false),
            ("::", 0, "ff::", true),
        ];
        for (address, bits, other, expected) in rows {
            let network = Network { address: address.parse().unwrap(), bits };
            assert_eq!(
                network.contains(other.parse().unwrap()),
                expected,
                "{address}/{bits} {other}"
            );
        }
    }
}
