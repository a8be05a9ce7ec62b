//! Authenticates manifests of checkpoint images: a tag, HMAC-SHA256 under the job's key, shows that
//! an agent of this job has written a manifest.
//!
//! In: the text of a manifest. Out: its tag, 64 hexadecimal digits, which begin the manifest file.
//! Only a process with the job's key can make a tag, so an image that another user has put into a
//! folder or an object store is never restored.
//!
//! What may never happen: the key is printed.

use anyhow::{Context, Result};
use hmac::{Hmac, Mac};
use landbridge_proto::id::JobKey;
use sha2::Sha256;

use super::packed_file::hex;

/// Prefix of the authenticated text, because the job's key authenticates other data as well.
const LABEL: &[u8] = b"landbridge checkpoint manifest";

/// Makes and verifies the tags of one job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManifestAuthenticator(JobKey);

impl ManifestAuthenticator {
    /// `key`: the job's key in hexadecimal digits.
    pub fn new(key: &str) -> Result<ManifestAuthenticator> {
        JobKey::from_hex(key).map(ManifestAuthenticator).context("the job has no key")
    }

    pub fn tag(&self, text: &str) -> String {
        hex(&self.mac(text).finalize().into_bytes())
    }

    /// Whether `tag` is the tag of `text`; compares in constant time.
    pub fn verify(&self, text: &str, tag: &str) -> bool {
        let digits = tag.as_bytes().chunks(2);
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        let tag: Option<Vec<u8>> = digits.map(byte).collect();
        tag.is_some_and(|tag| self.mac(text).verify_slice(&tag).is_ok())
    }

    fn mac(&self, text: &str) -> Hmac<Sha256> {
        // HMAC takes keys of any length, so this cannot fail.
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0.0).expect("HMAC takes any key");
        mac.update(LABEL);
        mac.update(text.as_bytes());
        mac
    }

    #[cfg(test)]
    pub fn sample(key: u8) -> ManifestAuthenticator {
        ManifestAuthenticator(JobKey([key; 32]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_proven_by_the_key_of_its_job_alone() {
        let (ours, theirs) = (ManifestAuthenticator::sample(1), ManifestAuthenticator::sample(2));
        let tag = ours.tag("text");
        assert_eq!(tag.len(), 64);
        assert!(ours.verify("text", &tag) && tag != ours.tag("texts"));
        assert!(!ours.verify("texts", &tag) && !theirs.verify("text", &tag));
        for wrong in ["", "00", &tag[..62], &theirs.tag("text"), "éé", &"g".repeat(64)] {
            assert!(!ours.verify("text", wrong), "{wrong}");
        }
        assert!(
            ManifestAuthenticator::new(&"ab".repeat(32)).is_ok()
                && ManifestAuthenticator::new("ab").is_err()
        );
        assert_eq!(format!("{ours:?}"), "ManifestAuthenticator(JobKey(secret))");
    }
}
