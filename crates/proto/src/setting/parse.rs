//! Parsers of the texts of settings. Each error quotes the text and says what to write instead.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::time::Duration;

use super::{Network, SettingKind, Value};

/// Units of time, in microseconds.
const TIMES: [(&str, u64); 5] =
    [("us", 1), ("ms", 1_000), ("s", 1_000_000), ("min", 60_000_000), ("h", 3_600_000_000)];
/// Units of size, in bytes, smallest first.
const SIZES: [(&str, u64); 4] = [("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];
/// Most entries of a list of networks: no host has more interfaces.
const NETWORKS_MAX: usize = 256;

pub(super) fn parse(kind: SettingKind, text: &str) -> Result<Value, String> {
    match kind {
        SettingKind::Time { min_us, max_us } => {
            let micros = time(text)?;
            within(text, micros, min_us, max_us, &TIMES)?;
            Ok(Value::Time(Duration::from_micros(micros)))
        }
        SettingKind::Size { min, max } => {
            within(text, size(text)?, min, max, &SIZES).map(Value::Number)
        }
        SettingKind::Count { min, max } => {
            within(text, count(text)?, min, max, &[]).map(Value::Number)
        }
        SettingKind::Switch => switch(text).map(Value::Switch),
        SettingKind::Choice(words) => choice(text, words).map(Value::Word),
        SettingKind::Choices(words) => choices(text, words).map(Value::Words),
        SettingKind::Networks => networks(text).map(Value::Networks),
        SettingKind::Folder(words) => folder(text, words).map(|()| Value::Text),
        SettingKind::Text => Ok(Value::Text),
    }
}

fn time(text: &str) -> Result<u64, String> {
    let advice = || {
        let units = TIMES.map(|(unit, _)| unit).join(", ");
        format!("{text:?} is no time: write a whole number and its unit ({units}), such as 200ms")
    };
    let (digits, unit) = split(text);
    if unit.is_empty() && !digits.is_empty() {
        return Err(format!("{text:?} has no unit: write {digits}s or {digits}ms"));
    }
    scaled(digits, unit, &TIMES, text).unwrap_or_else(|| Err(advice()))
}

fn size(text: &str) -> Result<u64, String> {
    let (digits, unit) = split(text);
    let unit = if unit.is_empty() { "B" } else { unit };
    scaled(digits, unit, &SIZES, text).unwrap_or_else(|| {
        Err(format!(
            "{text:?} is no size: write a whole number and B, KiB, MiB or GiB, such as 64KiB"
        ))
    })
}

fn count(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("{text:?} is no number: write decimal digits"))
}

/// The leading digits, and the rest without the blanks in between.
fn split(text: &str) -> (&str, &str) {
    let end = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    (&text[..end], text[end..].trim_start())
}

/// `digits` times `unit`. `None` if `digits` is empty or `unit` is unknown; an error if the product
/// is too large.
fn scaled(
    digits: &str,
    unit: &str,
    units: &[(&str, u64)],
    text: &str,
) -> Option<Result<u64, String>> {
    let &(_, scale) = units.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit))?;
    if digits.is_empty() {
        return None;
    }
    let number = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(scale));
    Some(number.ok_or_else(|| format!("{text:?} is too large a number")))
}

fn within(
    text: &str,
    number: u64,
    min: u64,
    max: u64,
    units: &[(&str, u64)],
) -> Result<u64, String> {
    if number < min {
        return Err(format!("{text} is too little: at least {}", shown(min, units)));
    }
    if number > max {
        return Err(format!("{text} is too much: at most {}", shown(max, units)));
    }
    Ok(number)
}

/// Shows a number in the largest unit that gives a whole number.
fn shown(number: u64, units: &[(&str, u64)]) -> String {
    let fits = |(_, scale): &&(&str, u64)| number.is_multiple_of(*scale);
    match units.iter().rev().find(fits) {
        Some((unit, scale)) => format!("{}{unit}", number / scale),
        None => format!("{number}"),
    }
}

fn switch(text: &str) -> Result<bool, String> {
    let is = |words: &[&str]| words.iter().any(|word| word.eq_ignore_ascii_case(text));
    if is(&["on", "yes", "true", "1"]) {
        return Ok(true);
    }
    if is(&["off", "no", "false", "0"]) {
        return Ok(false);
    }
    Err(format!("{text:?} is neither on nor off"))
}

fn choice(text: &str, words: &'static [&'static str]) -> Result<&'static str, String> {
    let found = words.iter().copied().find(|word| word.eq_ignore_ascii_case(text));
    found.ok_or_else(|| format!("{text:?} is none of {}", words.join(", ")))
}

fn choices(text: &str, words: &'static [&'static str]) -> Result<Vec<&'static str>, String> {
    let named: Result<Vec<_>, _> = items(text).map(|item| choice(item, words)).collect();
    let named = named?;
    if named.is_empty() {
        return Err(format!("the list is empty: name at least one of {}", words.join(", ")));
    }
    Ok(words.iter().copied().filter(|word| named.contains(word)).collect())
}

/// Checks that a folder is absolute: the program that opens it has another working directory than
/// its user.
fn folder(text: &str, words: &[&str]) -> Result<(), String> {
    let is_it = |word: &&str| text == *word || (word.ends_with('/') && text.starts_with(word));
    if text.starts_with('/') || words.iter().any(is_it) {
        return Ok(());
    }
    let or = words.join(" or ");
    Err(format!(
        "{text:?} is not an absolute path: write it from / on, such as /var/tmp/me, or {or}"
    ))
}

fn networks(text: &str) -> Result<Vec<Network>, String> {
    if text.eq_ignore_ascii_case("auto") {
        let any = [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)];
        return Ok(any.map(|address| Network { address, bits: 0 }).into());
    }
    if items(text).count() > NETWORKS_MAX {
        return Err(format!("the list is too long: name at most {NETWORKS_MAX}, or prefixes"));
    }
    items(text).map(network).collect()
}

fn network(text: &str) -> Result<Network, String> {
    let (address, bits) = match text.split_once('/') {
        Some((address, bits)) => (address, Some(bits)),
        None => (text, None),
    };
    let address: IpAddr = address.parse().map_err(|_| {
        format!("{text:?} is no IP address or prefix: write them as 10.1.0.7 or 10.1.0.0/16")
    })?;
    let most = if address.is_ipv4() { 32 } else { 128 };
    match bits.map_or(Ok(most), str::parse) {
        Ok(bits) if bits <= most => Ok(Network { address, bits }),
        _ => Err(format!("{text:?}: behind the slash stands a number of bits, 0 to {most}")),
    }
}

/// The items between commas, without blanks around them; empty items do not count.
fn items(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|item| !item.is_empty())
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;
    use std::vec;

    use super::*;

    const TIME: SettingKind = SettingKind::Time { min_us: 1_000, max_us: 60_000_000 };
    const SIZE: SettingKind = SettingKind::Size { min: 16, max: 1 << 30 };
    const COUNT: SettingKind = SettingKind::Count { min: 1, max: 64 };
    const CHOICE: SettingKind = SettingKind::Choice(&["cubic", "bbr"]);
    const FOLDER: SettingKind = SettingKind::Folder(&["off", "s3://"]);
    const CHOICES: SettingKind = SettingKind::Choices(&["shm", "tcp", "relay"]);

    #[test]
    fn what_is_right_is_read() {
        let ms = |ms| Value::Time(Duration::from_millis(ms));
        let rows = [
            (TIME, "200ms", ms(200)),
            (TIME, "60s", ms(60_000)),
            (TIME, "1 min", ms(60_000)),
            (TIME, "5000US", ms(5)),
            (SIZE, "64KiB", Value::Number(65_536)),
            (SIZE, "64 kib", Value::Number(65_536)),
            (SIZE, "16", Value::Number(16)),
            (SIZE, "16B", Value::Number(16)),
            (SIZE, "1GiB", Value::Number(1 << 30)),
            (COUNT, "64", Value::Number(64)),
            (SettingKind::Switch, "on", Value::Switch(true)),
            (SettingKind::Switch, "FALSE", Value::Switch(false)),
            (CHOICE, "BBR", Value::Word("bbr")),
            (CHOICES, "tcp, shm,,tcp", Value::Words(vec!["shm", "tcp"])),
            (SettingKind::Networks, "", Value::Networks(vec![])),
            (FOLDER, "/var/tmp", Value::Text),
            (FOLDER, "off", Value::Text),
            (FOLDER, "s3://a/b", Value::Text),
            (SettingKind::Text, "any | thing", Value::Text),
        ];
        for (kind, text, expected) in rows {
            assert_eq!(parse(kind, text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_is_wrong_is_explained() {
        let rows = [
            (TIME, "60", "\"60\" has no unit: write 60s or 60ms"),
            (
                TIME,
                "5m",
                "\"5m\" is no time: write a whole number and its unit (us, ms, s, min, h), such as",
            ),
            (TIME, "", "write a whole number and its unit"),
            (TIME, "s", "write a whole number and its unit"),
            (TIME, "1.5s", "write a whole number and its unit"),
            (TIME, "-1s", "write a whole number and its unit"),
            (TIME, "5 days", "write a whole number and its unit"),
            (TIME, "999us", "too little: at least 1ms"),
            (TIME, "2h", "too much: at most 1min"),
            (TIME, "18446744073709551615h", "too large a number"),
            (TIME, "99999999999999999999s", "too large a number"),
            (SIZE, "64KB", "B, KiB, MiB or GiB"),
            (SIZE, "", "B, KiB, MiB or GiB"),
            (SIZE, "15", "too little: at least 16B"),
            (SIZE, "2GiB", "too much: at most 1GiB"),
            (COUNT, "four", "write decimal digits"),
            (COUNT, "-1", "write decimal digits"),
            (COUNT, "0", "at least 1"),
            (COUNT, "65", "at most 64"),
            (SettingKind::Switch, "maybe", "\"maybe\" is neither on nor off"),
            (CHOICE, "reno", "\"reno\" is none of cubic, bbr"),
            (CHOICES, "shm,tpc", "\"tpc\" is none of shm, tcp, relay"),
            (CHOICES, ",", "name at least one of shm, tcp, relay"),
            (
                FOLDER,
                "scratch/me",
                "\"scratch/me\" is not an absolute path: write it from / on, such as /var/tmp/me, \
                 or off or s3://",
            ),
            (FOLDER, "./x", "write it from / on"),
            (FOLDER, "off/x", "write it from / on"),
            (SettingKind::Networks, "eth0", "\"eth0\" is no IP address or prefix"),
            (SettingKind::Networks, "10.0.0.1,10.0.0.0/33", "0 to 32"),
            (SettingKind::Networks, "::/x", "0 to 128"),
        ];
        for (kind, text, expected) in rows {
            let error = parse(kind, text).unwrap_err();
            assert!(error.contains(expected), "{text:?}: {error}");
        }
        let long = vec!["10.0.0.1"; NETWORKS_MAX + 1].join(",");
        assert!(parse(SettingKind::Networks, &long).unwrap_err().contains("too long"));
    }

    #[test]
    fn every_address_is_on_a_rail_unless_they_are_named() {
        let holds = |text: &str, address: &str| {
            let networks = parse(SettingKind::Networks, text).unwrap().networks().unwrap();
            networks.iter().any(|network| network.contains(address.parse().unwrap()))
        };
        assert!(holds("auto", "192.0.2.1") && holds("auto", "fd00::1"));
        assert!(holds("10.0.0.0/8, 192.0.2.1", "192.0.2.1"));
        assert!(!holds("10.0.0.0/8, 192.0.2.1", "192.0.2.2"));
        assert!(!holds("", "192.0.2.1"));
    }

    #[test]
    fn bounds_are_shown_in_their_largest_unit() {
        let shown = |number, units: &[(&str, u64)]| shown(number, units).to_string();
        assert_eq!(shown(86_400_000_000, &TIMES), "24h");
        assert_eq!(shown(1_500_000, &TIMES), "1500ms");
        assert_eq!(shown(1 << 20, &SIZES), "1MiB");
        assert_eq!(shown(7, &[]), "7");
    }
}
