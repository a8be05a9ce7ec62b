//! Values of settings, parsed from their texts.

use alloc::vec::Vec;
use core::net::IpAddr;
use core::time::Duration;

/// The value of a setting. The variant depends on the row's [`SettingKind`](super::SettingKind)
/// alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// Value of a [`SettingKind::Time`](super::SettingKind::Time).
    Time(Duration),
    /// Value of a [`SettingKind::Size`](super::SettingKind::Size), in bytes, or of a
    /// [`SettingKind::Count`](super::SettingKind::Count).
    Number(u64),
    /// Value of a [`SettingKind::Switch`](super::SettingKind::Switch).
    Switch(bool),
    /// Value of a [`SettingKind::Choice`](super::SettingKind::Choice).
    Word(&'static str),
    /// Value of a [`SettingKind::Choices`](super::SettingKind::Choices), in the order of the row,
    /// each word once.
    Words(Vec<&'static str>),
    /// Value of a [`SettingKind::Networks`](super::SettingKind::Networks). Two networks that
    /// contain every address stand for `auto`.
    Networks(Vec<Network>),
    /// Value of a [`SettingKind::Folder`](super::SettingKind::Folder) or a
    /// [`SettingKind::Text`](super::SettingKind::Text), for which readers use the text itself.
    Text,
}

impl Value {
    /// The duration, if the value is a time.
    pub fn duration(&self) -> Option<Duration> {
        if let Value::Time(time) = self { Some(*time) } else { None }
    }

    /// The number of bytes of a size, or the number of a count.
    pub fn number(&self) -> Option<u64> {
        if let Value::Number(number) = self { Some(*number) } else { None }
    }

    /// Whether a switch is on; `None` if the value is no switch.
    pub fn is_on(&self) -> Option<bool> {
        if let Value::Switch(is_on) = self { Some(*is_on) } else { None }
    }

    /// The word, if the value is a choice.
    pub fn word(&self) -> Option<&'static str> {
        if let Value::Word(word) = self { Some(word) } else { None }
    }

    /// The words, if the value is a list of choices.
    pub fn words(self) -> Option<Vec<&'static str>> {
        if let Value::Words(words) = self { Some(words) } else { None }
    }

    /// The networks, if the value is a list of networks.
    pub fn networks(self) -> Option<Vec<Network>> {
        if let Value::Networks(networks) = self { Some(networks) } else { None }
    }
}

/// An IP prefix: all addresses with the same leading bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    /// Any address of the network.
    pub address: IpAddr,
    /// Number of leading bits that all addresses share: at most 32 (IPv4) or 128 (IPv6).
    pub bits: u8,
}

impl Network {
    /// Whether the network contains `address`.
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

/// Whether the first `bits` bits of both addresses are equal.
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
