//! Bodies of control messages: values one after the other, without names.
//!
//! Numbers are little endian; text and lists begin with their length. What may never happen: a
//! length is trusted before the bytes have arrived.

use serde::Serialize;

use super::rank_state::RecordingUpdate;
use super::{Ending, Stage};
use crate::pmi::kvs::Delta;
use crate::pmi::server::NameRequest;

/// Flag of a recording update: the record has no space left.
const FULL: u32 = 1;
/// Flag of a recording update: more pieces of the same batch follow.
const CONTINUES: u32 = 2;

/// Stands for an unknown share.
const PERCENT_UNKNOWN: u32 = u32::MAX;

/// Appends values to the body of a message.
pub(super) struct BodyWriter<'a>(pub &'a mut Vec<u8>);

impl BodyWriter<'_> {
    pub fn number(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    pub fn bytes(&mut self, bytes: &[u8]) {
        self.number(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
        self.0.extend_from_slice(bytes);
    }

    pub fn text(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }

    pub fn document(&mut self, document: &impl Serialize) {
        // The documents hold only text, numbers, lists and tables, and TOML can represent all of
        // them.
        self.text(&toml::to_string(document).expect("it is a TOML document"));
    }

    pub fn delta(&mut self, delta: &Delta) {
        self.number(u32::try_from(delta.len()).unwrap_or(u32::MAX));
        for (key, value) in delta {
            self.text(key);
            self.text(value);
        }
    }

    pub fn long(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    /// Writes a number with seven bits in each byte, so that small numbers take few bytes.
    fn short(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    pub fn recording_update(&mut self, update: &RecordingUpdate) {
        self.number(update.rank);
        let full = if update.is_full { FULL } else { 0 };
        self.number(full | if update.continues { CONTINUES } else { 0 });
        self.long(update.polls);
        self.long(update.base);
        self.long(update.from);
        self.bytes(&update.reads);
        self.long(update.first_determinant);
        self.number(u32::try_from(update.determinants.len()).unwrap_or(u32::MAX));
        update.determinants.iter().flatten().for_each(|&number| self.short(number));
        self.bytes(&update.files);
    }

    pub fn percent(&mut self, share: Option<u8>) {
        self.number(share.map_or(PERCENT_UNKNOWN, u32::from));
    }

    pub fn ending(&mut self, ending: Ending) {
        let (kind, value) = match ending {
            Ending::Exited(code) => (0, code),
            Ending::Killed(signal) => (1, signal),
        };
        self.number(kind);
        self.number(value.cast_unsigned());
    }

    pub fn name_request(&mut self, request: &NameRequest) {
        let (kind, service, port) = match request {
            NameRequest::Publish { service, port } => (0, service, port.as_str()),
            NameRequest::Unpublish { service } => (1, service, ""),
            NameRequest::Lookup { service } => (2, service, ""),
        };
        self.number(kind);
        self.text(service);
        self.text(port);
    }
}

/// Takes values from the front of a body. `None`: the bytes are no such value.
pub(super) struct BodyReader<'a>(pub &'a [u8]);

impl<'a> BodyReader<'a> {
    pub fn number(&mut self) -> Option<u32> {
        let (number, rest) = self.0.split_first_chunk::<4>()?;
        self.0 = rest;
        Some(u32::from_le_bytes(*number))
    }

    pub fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = self.number()? as usize;
        let (bytes, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(bytes)
    }

    pub fn text(&mut self) -> Option<String> {
        String::from_utf8(self.bytes()?.to_vec()).ok()
    }

    pub fn document<T: serde::de::DeserializeOwned>(&mut self) -> Option<Box<T>> {
        toml::from_str(&self.text()?).ok().map(Box::new)
    }

    pub fn delta(&mut self) -> Option<Delta> {
        let count = self.number()?;
        (0..count).map(|_| Some((self.text()?, self.text()?))).collect()
    }

    pub fn ending(&mut self) -> Option<Ending> {
        let kind = self.number()?;
        let value = self.number()?.cast_signed();
        match kind {
            0 => Some(Ending::Exited(value)),
            1 => Some(Ending::Killed(value)),
            _ => None,
        }
    }

    pub fn long(&mut self) -> Option<u64> {
        let (number, rest) = self.0.split_first_chunk::<8>()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*number))
    }

    fn short(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    pub fn recording_update(&mut self) -> Option<RecordingUpdate> {
        let rank = self.number()?;
        let bits = self.number()?;
        let (is_full, continues) = (bits & FULL != 0, bits & CONTINUES != 0);
        let polls = self.long()?;
        let base = self.long()?;
        let from = self.long()?;
        let reads = self.bytes()?.to_vec();
        let first_determinant = self.long()?;
        let count = self.number()?;
        let one = |body: &mut Self| Some([body.short()?, body.short()?, body.short()?]);
        let determinants = (0..count).map(|_| one(self)).collect::<Option<_>>()?;
        let files = self.bytes()?.to_vec();
        let rest = RecordingUpdate {
            rank,
            base,
            is_full,
            continues,
            polls,
            from,
            ..RecordingUpdate::default()
        };
        Some(RecordingUpdate { reads, first_determinant, determinants, files, ..rest })
    }

    /// Whether all bytes of the body were taken.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn percent(&mut self) -> Option<Option<u8>> {
        match self.number()? {
            PERCENT_UNKNOWN => Some(None),
            share => u8::try_from(share).ok().filter(|share| *share <= 100).map(Some),
        }
    }

    pub fn stage(&mut self) -> Option<Stage> {
        [Stage::Silent, Stage::Joined, Stage::Finalized].get(self.number()? as usize).copied()
    }

    pub fn name_request(&mut self) -> Option<NameRequest> {
        let kind = self.number()?;
        let service = self.text()?;
        let port = self.text()?;
        match kind {
            0 => Some(NameRequest::Publish { service, port }),
            1 => Some(NameRequest::Unpublish { service }),
            2 => Some(NameRequest::Lookup { service }),
            _ => None,
        }
    }
}
