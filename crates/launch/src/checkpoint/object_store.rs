//! Checkpoint images in an object store that speaks the S3 protocol, in addition to the images in
//! the folder of the node.
//!
//! In: a sealed image. Out: the image's files as objects below `PREFIX/JOB/rank-N/NUMBER/`, in
//! pieces, the manifest last: so an image is in the object store if its manifest is. An image that
//! a node has lost is fetched into the image's folder, and checked there like any other image. The
//! calling thread makes the requests; a request fails when no byte moves for a bounded time
//! ([`STALL_MAX`]).
//!
//! What may never happen: keys are printed; a caller waits without bound for an object store that
//! does not answer.

use std::fmt;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rusty_s3::{Bucket, Credentials, S3Action, UrlStyle};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, SendBody};

use super::checkpoint_image::{CheckpointImage, MANIFEST, new_folder};
use super::manifest_authenticator::ManifestAuthenticator;
use super::packed_file::new_file;

const SCHEME: &str = "s3://";
/// Bytes of a file in one object: small enough for object stores, and what a failed transfer has to
/// repeat.
const PIECE_BYTES: u64 = 64 << 20;
/// Most bytes of a manifest.
const MANIFEST_BYTES_MAX: u64 = 16 << 20;
/// Most lists of up to 1,000 objects of a rank that are deleted.
const LISTS_MAX: u32 = 100;
/// Attempts to transfer an object.
const ATTEMPTS: u32 = 3;
/// Time without progress after which a request has failed.
const STALL_MAX: Duration = Duration::from_secs(30);
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// Time for which a signed URL is valid.
const URL_VALID_FOR: Duration = Duration::from_secs(3_600);
/// Files with the certificates that this machine trusts, on several Linux distributions.
const TRUSTED: [&str; 3] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"];

/// An object store, and the images of one job in it.
#[derive(Clone)]
pub struct ObjectStore {
    bucket: Bucket,
    keys: Credentials,
    prefix: String,
    job: String,
    agent: Agent,
    /// No caller waits for the transfer any more, so it is to fail.
    is_over: Arc<AtomicBool>,
}

impl fmt::Debug for ObjectStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}/{}", SCHEME, self.bucket.name(), self.prefix)
    }
}

/// Whether `checkpoint_dir` names an object store.
pub fn is_object_store(place: &str) -> bool {
    place.starts_with(SCHEME)
}

impl ObjectStore {
    /// The object store at `s3://BUCKET/PREFIX`, with keys, region and endpoint from the usual
    /// `AWS_` variables. `allows_cleartext`: an unencrypted connection over a network is allowed,
    /// although others may read images there, which hold the job's key.
    pub fn new(
        place: &str,
        allows_cleartext: bool,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<ObjectStore> {
        let rest = place.strip_prefix(SCHEME).unwrap_or_default();
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            bail!("{place} names no bucket: write {SCHEME}BUCKET/PREFIX");
        }
        let needed = |name: &str| variable(name).with_context(|| format!("{name} is not set"));
        let (key, secret) = (needed("AWS_ACCESS_KEY_ID")?, needed("AWS_SECRET_ACCESS_KEY")?);
        let keys = match variable("AWS_SESSION_TOKEN") {
            Some(token) => Credentials::new_with_token(key, secret, token),
            None => Credentials::new(key, secret),
        };
        let region = variable("AWS_REGION").or_else(|| variable("AWS_DEFAULT_REGION"));
        let region = region.unwrap_or_else(|| "us-east-1".into());
        let endpoint = variable("AWS_ENDPOINT_URL_S3").or_else(|| variable("AWS_ENDPOINT_URL"));
        let endpoint = endpoint.unwrap_or_else(|| format!("https://s3.{region}.amazonaws.com"));
        let wrong = || format!("{endpoint:?} is no address of a store");
        let url = endpoint.parse().with_context(wrong)?;
        let bucket = Bucket::new(url, UrlStyle::Path, bucket.to_string(), region);
        let bucket = bucket.ok().with_context(wrong)?;
        let (scheme, host) = (bucket.base_url().scheme(), bucket.base_url().host_str());
        if scheme != "https" && !allows_cleartext && !is_loopback(host.unwrap_or_default()) {
            bail!(
                "{endpoint} is not on this machine, and checkpoints would go there in the clear, \
                 with the job's key: use https, or say --set checkpoint_open=on"
            );
        }
        let prefix = prefix.trim_matches('/').to_string();
        let agent = agent(variable("AWS_CA_BUNDLE").or_else(|| variable("SSL_CERT_FILE")));
        Ok(ObjectStore { bucket, keys, prefix, job: String::new(), agent, is_over: Arc::default() })
    }

    /// This object store, for the images of the job `job`.
    pub fn of_job(self, job: &str) -> ObjectStore {
        ObjectStore { job: job.to_string(), ..self }
    }

    /// Makes transfers in progress fail.
    pub fn stop(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    /// A copy of this object store without the effect of [`ObjectStore::stop`].
    pub fn fresh(&self) -> ObjectStore {
        ObjectStore { is_over: Arc::default(), ..self.clone() }
    }

    /// Uploads an image.
    pub fn put(&self, image: &CheckpointImage) -> Result<()> {
        for (name, bytes) in files(image) {
            let mut file = File::open(image.folder.join(&name))?;
            for (number, from, length) in pieces(bytes) {
                let object = self.object(&image.folder, &name, number);
                self.retry(&object, || {
                    file.seek(SeekFrom::Start(from))?;
                    let url = self.bucket.put_object(Some(&self.keys), &object).sign(URL_VALID_FOR);
                    let mut piece = (&mut file).take(length);
                    let request =
                        self.agent.put(url.as_str()).header("content-length", length.to_string());
                    request.send(SendBody::from_reader(&mut piece))?;
                    Ok(())
                })?;
            }
        }
        Ok(())
    }

    /// Fetches an image into the folder where it was, before the deadline.
    pub fn get(&self, image: &CheckpointImage, deadline: Instant) -> Result<()> {
        let number = image.header.number;
        let folder = new_folder(image.folder.with_file_name(format!(".{number}.in")))?;
        let outcome = self.get_into(image, &folder, deadline);
        if outcome.is_ok() {
            let _ = fs::remove_dir_all(&image.folder);
            fs::rename(&folder, &image.folder)?;
        } else {
            let _ = fs::remove_dir_all(&folder);
        }
        outcome
    }

    fn get_into(&self, image: &CheckpointImage, folder: &Path, deadline: Instant) -> Result<()> {
        for (name, bytes) in files(image) {
            let mut file = new_file(&folder.join(&name))?;
            for (number, from, length) in pieces(bytes) {
                let object = self.object(&image.folder, &name, number);
                self.retry(&object, || {
                    file.seek(SeekFrom::Start(from))?;
                    // A surplus byte would show as a checksum mismatch.
                    self.fetch(&object, length + 1, &mut file, deadline)
                })?;
            }
        }
        Ok(())
    }

    /// An image that another agent has uploaded, as it would lie in this folder.
    pub fn find(
        &self,
        folder: PathBuf,
        tag: &str,
        authenticator: &ManifestAuthenticator,
        deadline: Instant,
    ) -> Result<CheckpointImage> {
        let object = self.object(&folder, MANIFEST, 0);
        let mut bytes = Vec::new();
        self.retry(&object, || {
            bytes.clear();
            self.fetch(&object, MANIFEST_BYTES_MAX, &mut bytes, deadline)
        })?;
        let text = String::from_utf8(bytes).context("its manifest is damaged")?;
        CheckpointImage::of(folder, &text, tag, authenticator)
    }

    /// Reads at most `most` bytes of an object, before the deadline.
    fn fetch(
        &self,
        object: &str,
        most: u64,
        into: &mut impl Write,
        deadline: Instant,
    ) -> Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            bail!("there is no time left");
        }
        let url = self.bucket.get_object(Some(&self.keys), object).sign(URL_VALID_FOR);
        let request = self.agent.get(url.as_str()).config().timeout_global(Some(left)).build();
        let mut body = request.call()?.into_body();
        std::io::copy(&mut body.as_reader().take(most), into)?;
        Ok(())
    }

    /// Announces that the spare node with lease number `name` reaches the object store, after
    /// reading back what it has written there.
    pub fn announce_spare(&self, job: &str, name: u32) -> Result<()> {
        let word = "landbridge";
        let (trial, sign) =
            (self.spare_object(job, "try", name), self.spare_object(job, "spare", name));
        let put = |object: &str| {
            let url = self.bucket.put_object(Some(&self.keys), object).sign(URL_VALID_FOR);
            self.agent.put(url.as_str()).send(word)?;
            Ok(())
        };
        self.retry(&trial, || put(&trial))?;
        let (mut read, deadline) = (Vec::new(), Instant::now() + STALL_MAX);
        self.retry(&trial, || {
            read.clear();
            self.fetch(&trial, word.len() as u64 + 1, &mut read, deadline)
        })?;
        self.remove_object(&trial);
        if read != word.as_bytes() {
            bail!("object {trial}: what is read is not what was written");
        }
        self.retry(&sign, || put(&sign))
    }

    /// The spare nodes that have not announced themselves in the object store by the deadline. A
    /// node that does not reach the object store never does, so callers give a short deadline.
    pub fn unannounced_spares(&self, job: &str, spares: &[u32], deadline: Instant) -> Vec<u32> {
        let is_announced = |name: u32| {
            let object = self.spare_object(job, "spare", name);
            loop {
                match self.fetch(&object, 1, &mut std::io::sink(), Instant::now() + STALL_MAX) {
                    Ok(()) => return true,
                    Err(_)
                        if Instant::now() >= deadline || self.is_over.load(Ordering::Relaxed) =>
                    {
                        return false;
                    }
                    Err(_) => std::thread::sleep(Duration::from_millis(100)),
                }
            }
        };
        spares.iter().copied().filter(|&name| !is_announced(name)).collect()
    }

    pub fn withdraw_spare(&self, job: &str, name: u32) {
        self.remove_object(&self.spare_object(job, "spare", name));
    }

    fn spare_object(&self, job: &str, kind: &str, name: u32) -> String {
        format!("{}/{job}/{kind}-{name}", self.prefix).trim_start_matches('/').to_string()
    }

    /// Deletes an object; returns whether the request has succeeded. A failure has no further
    /// consequence.
    fn remove_object(&self, object: &str) -> bool {
        let url = self.bucket.delete_object(Some(&self.keys), object).sign(URL_VALID_FOR);
        self.agent.delete(url.as_str()).call().is_ok()
    }

    /// Deletes the objects of an image that exist, and stops at the first failure. Returns whether
    /// there was none.
    pub fn remove(&self, image: &CheckpointImage) -> bool {
        // The manifest is deleted first, because without its manifest an image does not count as
        // stored.
        for (name, bytes) in files(image).into_iter().rev() {
            for (number, ..) in pieces(bytes) {
                let object = self.object(&image.folder, &name, number);
                if !self.remove_object(&object) {
                    return false;
                }
            }
        }
        true
    }

    /// Deletes all objects of a rank, whichever node has put them there, also those of half an
    /// image. Returns whether nothing is left.
    pub fn remove_rank(&self, rank: u32) -> bool {
        // The folders of a rank that has moved end with a number.
        ['/', '.'].iter().all(|end| {
            let prefix = format!("{}/{}/rank-{rank}{end}", self.prefix, self.job);
            self.remove_below(prefix.trim_start_matches('/')).is_ok_and(|removed| removed)
        })
    }

    fn remove_below(&self, prefix: &str) -> Result<bool> {
        for _ in 0..LISTS_MAX {
            // The object with no name is the bucket itself: the request is ListObjectsV2.
            let mut list = self.bucket.get_object(Some(&self.keys), "");
            list.query_mut().insert("list-type", "2");
            list.query_mut().insert("prefix", prefix);
            let url = list.sign(URL_VALID_FOR);
            let text = self.agent.get(url.as_str()).call()?.into_body().read_to_string()?;
            let found: Vec<&str> = listed_objects(&text).collect();
            if found.is_empty() {
                return Ok(true);
            }
            // A name with characters that XML escapes does not begin so, and stays.
            let remove = |object: &&str| object.starts_with(prefix) && self.remove_object(object);
            if !found.iter().all(remove) {
                return Ok(false);
            }
        }
        Ok(false)
    }

    fn retry(&self, object: &str, mut attempt: impl FnMut() -> Result<()>) -> Result<()> {
        let mut tried = 0;
        loop {
            if self.is_over.load(Ordering::Relaxed) {
                bail!("nobody waits for it any more");
            }
            tried += 1;
            match attempt() {
                Ok(()) => return Ok(()),
                Err(error) if tried >= ATTEMPTS => {
                    return Err(error).with_context(|| format!("object {object}"));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(200) * tried),
            }
        }
    }

    /// Name of the object with a piece of a file; the last two names of the folder are the rank's
    /// and the image's.
    fn object(&self, folder: &Path, name: &str, number: u64) -> String {
        let names: Vec<_> = folder.iter().map(|part| part.to_string_lossy()).collect();
        let place = names[names.len().saturating_sub(2)..].join("/");
        let object = format!("{}/{}/{place}/{name}.{number}", self.prefix, self.job);
        object.trim_start_matches('/').to_string()
    }
}

/// The names of the objects in a list of an object store, which is XML.
fn listed_objects(list: &str) -> impl Iterator<Item = &str> {
    let after_tags = list.split("<Key>").skip(1);
    after_tags.filter_map(|text| text.split_once("</Key>").map(|(name, _)| name))
}

/// Whether a connection to this host does not leave this machine.
fn is_loopback(host: &str) -> bool {
    let host = host.trim_matches(['[', ']']);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn agent(trusted: Option<String>) -> Agent {
    let named = trusted.iter().map(String::as_str);
    let text = named.chain(TRUSTED).find_map(|path| fs::read(path).ok()).unwrap_or_default();
    let roots = parse_pem(&text).filter_map(|item| match item {
        Ok(PemItem::Certificate(certificate)) => Some(certificate),
        _ => None,
    });
    let roots: Vec<_> = roots.collect();
    let ring = Arc::new(rustls::crypto::ring::default_provider());
    let tls = TlsConfig::builder().root_certs(RootCerts::new_with_certs(&roots));
    let tls = tls.unversioned_rustls_crypto_provider(ring).build();
    Agent::config_builder()
        .tls_config(tls)
        .timeout_connect(Some(CONNECT_MAX))
        .timeout_recv_response(Some(2 * STALL_MAX))
        .timeout_per_read(Some(STALL_MAX))
        .timeout_per_write(Some(STALL_MAX))
        .build()
        .into()
}

/// Names and lengths of the stored files of an image, the manifest last.
fn files(image: &CheckpointImage) -> Vec<(String, u64)> {
    let files = image.files.iter().cloned();
    files.chain([(MANIFEST.to_string(), image.manifest_bytes)]).collect()
}

/// Number, beginning and length of each piece of a file of so many bytes; an empty file has one
/// piece.
fn pieces(bytes: u64) -> impl Iterator<Item = (u64, u64, u64)> {
    (0..bytes.div_ceil(PIECE_BYTES).max(1)).map(move |number| {
        let from = number * PIECE_BYTES;
        (number, from, (bytes - from).min(PIECE_BYTES))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object_store(
        place: &str,
        set: &'static [(&'static str, &'static str)],
    ) -> Result<ObjectStore> {
        let value = |name: &str| set.iter().find(|(known, _)| *known == name);
        ObjectStore::new(place, false, |name| value(name).map(|(_, value)| value.to_string()))
    }

    #[test]
    fn a_store_is_named_by_its_bucket_and_the_usual_variables() {
        const KEYS: &[(&str, &str)] = &[
            ("AWS_ACCESS_KEY_ID", "us"),
            ("AWS_SECRET_ACCESS_KEY", "hush"),
            ("AWS_ENDPOINT_URL", "http://127.0.0.1:5000"),
        ];
        let it = object_store("s3://images/of/me/", KEYS).unwrap().of_job("JOB");
        assert_eq!(it.bucket.base_url().as_str(), "http://127.0.0.1:5000/images/");
        assert_eq!(format!("{it:?}"), "s3://images/of/me");
        let folder = Path::new("/proc/7/fd/9/rank-3/12");
        assert_eq!(it.object(folder, "a.img", 0), "of/me/JOB/rank-3/12/a.img.0");
        let bare = object_store("s3://images", &KEYS[..2]).unwrap().of_job("JOB");
        assert_eq!(bare.bucket.base_url().as_str(), "https://s3.us-east-1.amazonaws.com/images/");
        assert_eq!(bare.object(folder, "a.img", 1), "JOB/rank-3/12/a.img.1");
        let error = object_store("s3://images", &[]).unwrap_err();
        assert_eq!(error.to_string(), "AWS_ACCESS_KEY_ID is not set");
        assert!(object_store("s3:///x", KEYS).unwrap_err().to_string().contains("names no bucket"));
        assert!(is_object_store("s3://images") && !is_object_store("/tmp/s3://"));
    }

    #[test]
    fn images_go_over_a_network_in_the_clear_only_if_somebody_says_so() {
        let store = |endpoint: &str, allows_cleartext| {
            let variable = |name: &str| match name {
                "AWS_ENDPOINT_URL" => Some(endpoint.to_string()),
                "AWS_ACCESS_KEY_ID" | "AWS_SECRET_ACCESS_KEY" => Some("x".to_string()),
                _ => None,
            };
            ObjectStore::new("s3://images", allows_cleartext, variable)
        };
        for here in [
            "http://127.0.0.3:9000",
            "http://[::1]:9000",
            "http://localhost",
            "https://far.example",
        ] {
            store(here, false).unwrap();
        }
        for far in ["http://far.example:9000", "http://192.0.2.1", "http://localhost.example"] {
            let error = store(far, false).unwrap_err();
            assert!(error.to_string().contains("in the clear"), "{error}");
            store(far, true).unwrap();
        }
    }

    #[test]
    fn lists_name_objects() {
        let list = "<ListBucketResult><Name>images</Name><Contents><Key>of/J/rank-1/2/a.0</Key>\
                    <Size>3</Size></Contents><Contents><Key>b</Key></Contents></ListBucketResult>";
        assert_eq!(listed_objects(list).collect::<Vec<_>>(), ["of/J/rank-1/2/a.0", "b"]);
        assert_eq!(listed_objects("<Name>images</Name>").count(), 0);
    }

    #[test]
    fn pieces_are_all_of_a_file() {
        for bytes in [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES - 7] {
            let all: Vec<_> = pieces(bytes).collect();
            assert_eq!(all.iter().map(|(.., length)| length).sum::<u64>(), bytes);
            assert!(all.iter().enumerate().all(|(at, it)| it.1 == at as u64 * PIECE_BYTES));
            assert!(!all.is_empty());
        }
    }
}
