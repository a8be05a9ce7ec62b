//! Quantities as users write them in a lab file: `"1 Gbit/s"`, `"5 ms"`, `"0.1 %"`, `"256 KiB"`.
//!
//! Each type parses its own text form and prints a form that it can parse again. A bare number
//! stands for the base unit: bit/s, seconds, a fraction from 0 to 1, bytes. Rates, times and shares
//! may be measured ones, with decimals; a size is a whole number, as in the settings. No quantity
//! is negative, infinite or silently rounded to zero.

use std::fmt;
use std::str::FromStr;

use landbridge_proto::setting::{SettingKind, Value};
use serde::de::{self, Deserialize, Deserializer, Visitor};

/// A link's speed, 1 bit/s to 1 Tbit/s.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Rate {
    pub bits_per_second: u64,
}

/// A time of 0 ns to one hour, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Span {
    pub nanos: u64,
}

/// The probability of an event for a packet, 0 (never) to 1 (always).
#[derive(Clone, Copy, PartialEq, PartialOrd, Debug, Default)]
pub struct Share {
    pub fraction: f64,
}

/// A number of bytes, up to 1 TiB.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Size {
    pub bytes: u64,
}

impl Rate {
    /// Time to serialise `bytes` bytes in nanoseconds, rounded up so that the rate is never
    /// exceeded.
    pub fn serialisation_nanos(self, bytes: u64) -> u64 {
        let bit_nanos = u128::from(bytes) * 8 * 1_000_000_000;
        // 2^40 bytes at 1 bit/s would overflow; the result saturates, and such a packet never
        // leaves.
        u64::try_from(bit_nanos.div_ceil(u128::from(self.bits_per_second))).unwrap_or(u64::MAX)
    }

    /// Bytes that can be sent in `nanos` nanoseconds at this rate.
    pub fn bytes_in(self, nanos: u64) -> u64 {
        let bytes = u128::from(self.bits_per_second) * u128::from(nanos) / 8_000_000_000;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }
}

impl Span {
    pub const fn from_micros(micros: u64) -> Span {
        Span { nanos: micros * 1_000 }
    }
}

/// The text of a quantity that could not be parsed, and a description of valid texts.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not {expected}")]
pub struct BadQuantity {
    text: String,
    expected: &'static str,
}

const RATE_FORM: &str = "a rate such as \"1 Gbit/s\", \"68.05 Mbit/s\" or 1000000 (bit/s)";
const SPAN_FORM: &str = "a time up to an hour such as \"5 ms\", \"50 us\" or 0.005 (seconds)";
const SHARE_FORM: &str = "a share such as \"0.1 %\" or 0.001 (of all packets, 0 to 1)";
const SIZE_FORM: &str = "a size such as \"256 KiB\" or 262144 (bytes)";

const RATE_MAX: f64 = 1e12;
const SPAN_NANOS_MAX: f64 = 3.6e12;
const SIZE_MAX: u64 = 1 << 40;

impl FromStr for Rate {
    type Err = BadQuantity;
    fn from_str(text: &str) -> Result<Rate, BadQuantity> {
        let value = split(text).and_then(|(number, unit)| Some(number * rate_unit(unit)?));
        match value {
            Some(bits) if (1.0..=RATE_MAX).contains(&bits) => {
                Ok(Rate { bits_per_second: bits.round() as u64 })
            }
            _ => Err(bad(text, RATE_FORM)),
        }
    }
}

impl FromStr for Span {
    type Err = BadQuantity;
    fn from_str(text: &str) -> Result<Span, BadQuantity> {
        let value = split(text).and_then(|(number, unit)| Some(number * span_unit(unit)?));
        match value {
            Some(nanos) if (0.0..=SPAN_NANOS_MAX).contains(&nanos) => {
                Ok(Span { nanos: nanos.round() as u64 })
            }
            _ => Err(bad(text, SPAN_FORM)),
        }
    }
}

impl FromStr for Share {
    type Err = BadQuantity;
    fn from_str(text: &str) -> Result<Share, BadQuantity> {
        let value = split(text).and_then(|(number, unit)| match unit {
            "" => Some(number),
            "%" => Some(number / 100.0),
            _ => None,
        });
        match value {
            Some(fraction) if (0.0..=1.0).contains(&fraction) => Ok(Share { fraction }),
            _ => Err(bad(text, SHARE_FORM)),
        }
    }
}

impl FromStr for Size {
    type Err = BadQuantity;
    /// Parses a size as settings are: a whole number, and B, KiB, MiB or GiB.
    fn from_str(text: &str) -> Result<Size, BadQuantity> {
        match (SettingKind::Size { min: 1, max: SIZE_MAX }).parse(text) {
            Ok(Value::Number(bytes)) => Ok(Size { bytes }),
            _ => Err(bad(text, SIZE_FORM)),
        }
    }
}

fn bad(text: &str, expected: &'static str) -> BadQuantity {
    BadQuantity { text: text.to_owned(), expected }
}

/// Splits `"5 ms"` into 5.0 and `"ms"`.
fn split(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let number = text[..end].parse().ok()?;
    Some((number, text[end..].trim()))
}

fn rate_unit(unit: &str) -> Option<f64> {
    let prefix = match unit {
        "" => return Some(1.0),
        _ => unit.strip_suffix("bit/s").or_else(|| unit.strip_suffix("b/s"))?,
    };
    match prefix {
        "" => Some(1.0),
        "k" => Some(1e3),
        "M" => Some(1e6),
        "G" => Some(1e9),
        _ => None,
    }
}

fn span_unit(unit: &str) -> Option<f64> {
    match unit {
        "" | "s" => Some(1e9),
        "ms" => Some(1e6),
        "us" | "µs" => Some(1e3),
        "ns" => Some(1.0),
        _ => None,
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bits = self.bits_per_second as f64;
        match bits {
            b if b >= 1e9 => write!(f, "{} Gbit/s", b / 1e9),
            b if b >= 1e6 => write!(f, "{} Mbit/s", b / 1e6),
            b if b >= 1e3 => write!(f, "{} kbit/s", b / 1e3),
            b => write!(f, "{b} bit/s"),
        }
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanos = self.nanos as f64;
        match self.nanos {
            n if n >= 1_000_000_000 => write!(f, "{} s", nanos / 1e9),
            n if n >= 1_000_000 => write!(f, "{} ms", nanos / 1e6),
            n if n >= 1_000 => write!(f, "{} us", nanos / 1e3),
            n => write!(f, "{n} ns"),
        }
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} %", self.fraction * 100.0)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bytes {
            b if b.is_multiple_of(1 << 20) => write!(f, "{} MiB", b >> 20),
            b if b.is_multiple_of(1 << 10) => write!(f, "{} KiB", b >> 10),
            b => write!(f, "{b} B"),
        }
    }
}

macro_rules! deserialize_quantity {
    ($type:ty, $form:expr) => {
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<$type, D::Error> {
                struct Reader;
                impl Visitor<'_> for Reader {
                    type Value = $type;
                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str($form)
                    }
                    fn visit_str<E: de::Error>(self, text: &str) -> Result<$type, E> {
                        text.parse().map_err(E::custom)
                    }
                    fn visit_i64<E: de::Error>(self, number: i64) -> Result<$type, E> {
                        self.visit_str(&number.to_string())
                    }
                    fn visit_f64<E: de::Error>(self, number: f64) -> Result<$type, E> {
                        self.visit_str(&number.to_string())
                    }
                }
                deserializer.deserialize_any(Reader)
            }
        }
    };
}

deserialize_quantity!(Rate, RATE_FORM);
deserialize_quantity!(Span, SPAN_FORM);
deserialize_quantity!(Share, SHARE_FORM);
deserialize_quantity!(Size, SIZE_FORM);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn reads_what_people_write() {
        assert_eq!("1 Gbit/s".parse(), Ok(Rate { bits_per_second: 1_000_000_000 }));
        assert_eq!("68.054155Mb/s".parse(), Ok(Rate { bits_per_second: 68_054_155 }));
        assert_eq!("5 ms".parse(), Ok(Span { nanos: 5_000_000 }));
        assert_eq!("0.03695 ms".parse(), Ok(Span { nanos: 36_950 }));
        assert_eq!("0.5".parse(), Ok(Span { nanos: 500_000_000 }));
        assert_eq!("1 %".parse(), Ok(Share { fraction: 0.01 }));
        assert_eq!("256 KiB".parse(), Ok(Size { bytes: 262_144 }));
    }

    #[test]
    fn refuses_what_has_no_meaning() {
        for text in ["", "fast", "-1 Gbit/s", "1 GB/s", "0", "2 Tbit/s", "1e400"] {
            assert!(text.parse::<Rate>().is_err(), "{text}");
        }
        for text in ["", "-1 ms", "1 min", "2000 h", "99999"] {
            assert!(text.parse::<Span>().is_err(), "{text}");
        }
        for text in ["101 %", "1.5", "-1", "1 permille"] {
            assert!(text.parse::<Share>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn what_is_printed_can_be_read(
            bits in 1u64..1_000_000_000_000,
            nanos in 0u64..3_600_000_000_000,
            bytes in 1u64..=SIZE_MAX,
        ) {
            let size = Size { bytes };
            prop_assert_eq!(size.to_string().parse(), Ok(size));
            let rate = Rate { bits_per_second: bits };
            prop_assert_eq!(rate.to_string().parse(), Ok(rate));
            let span = Span { nanos };
            prop_assert_eq!(span.to_string().parse(), Ok(span));
        }

        #[test]
        fn serialisation_never_beats_the_rate(
            bits in 1u64..1_000_000_000_000,
            bytes in 0u64..100_000,
        ) {
            let rate = Rate { bits_per_second: bits };
            let nanos = rate.serialisation_nanos(bytes);
            prop_assert!(rate.bytes_in(nanos) >= bytes);
            prop_assert!(nanos == 0 || rate.bytes_in(nanos - 1) <= bytes);
        }
    }
}
