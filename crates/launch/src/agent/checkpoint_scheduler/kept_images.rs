//! The images of a rank that exist, and where others see them.
//!
//! In: sealed images, ended uploads, the nodes that may take over the rank. Out: images to restore
//! from, locations for the agent above, the position up to which the rank's log may be trimmed. An
//! image is *usable* once every node that may take over the rank can get it; an image of a round
//! ([`landbridge_proto::log::unit`]) once the round is whole. The newest [`KEPT_IMAGES`] images
//! stay, and the newest [`KEPT_IMAGES`] usable ones.
//!
//! What may never happen: an image is deleted, or a log trimmed, before as many newer images are
//! usable.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;
use std::thread::JoinHandle;

use super::UploadThread;
use super::disk_tasks::{self, BackgroundRemovals};
use crate::checkpoint::checkpoint_image::{CheckpointImage, ImageHeader};
use crate::checkpoint::object_store::ObjectStore;
use crate::control::rank_state::CheckpointLocation;

/// Images of a rank that are kept: if the newest image is torn, the rank is restored from the other
/// one.
pub const KEPT_IMAGES: usize = 2;

/// The images of one rank; the module head says which of them are kept.
#[derive(Default)]
pub struct KeptImages {
    /// Whole images, oldest first.
    pub(super) images: VecDeque<CheckpointImage>,
    /// Numbers of the images that are not usable yet, with the nodes that may need the image and
    /// cannot get it.
    pub(super) unavailable_to: BTreeMap<u64, Vec<u32>>,
    /// Images count once the rounds are whole to which they belong; this is the newest whole round.
    pub(super) whole_round: Option<u64>,
    /// Rounds that will never be whole.
    broken_rounds: BTreeSet<u64>,
    /// The locations of usable images that were reported to the agent above last.
    reported_locations: Vec<CheckpointLocation>,
    /// An upload thread that was stopped and has not ended yet.
    pub(super) stopped_upload: Option<UploadThread>,
    /// Images and folders that threads are deleting.
    pub(super) removals: BackgroundRemovals,
    /// Threads that are deleting images in the object store.
    store_removals: Vec<JoinHandle<bool>>,
    /// The rank, if it comes from another node, which may have left images of it in the store.
    moved_rank: Option<u32>,
    /// The store that has copies of the images, if there is one.
    object_store: Option<ObjectStore>,
    /// The log of the rank before this number of determinants is trimmed.
    pub(super) trimmed_to: u64,
    /// Something that an incarnation from the start of the program needs is trimmed: also if the
    /// rank has only sent so far, and has no determinants.
    is_trimmed: bool,
}

impl KeptImages {
    pub fn new(object_store: Option<ObjectStore>) -> KeptImages {
        KeptImages { object_store, ..KeptImages::default() }
    }

    /// Bytes that the images take, including images that are being deleted.
    pub fn bytes(&self) -> u64 {
        let sealed: u64 = self.images.iter().map(CheckpointImage::bytes).sum();
        sealed + self.removals.bytes()
    }

    pub fn newest(&self) -> Option<&CheckpointImage> {
        self.images.back()
    }

    pub fn newest_first(&self) -> Vec<CheckpointImage> {
        self.images.iter().rev().cloned().collect()
    }

    /// Adds an image that is newer than all known images. `unavailable_to`: the nodes that may need
    /// the image and cannot get it.
    pub fn add(&mut self, image: CheckpointImage, unavailable_to: Vec<u32>) {
        if !unavailable_to.is_empty() {
            self.unavailable_to.insert(image.header.number, unavailable_to);
        }
        self.images.push_back(image);
    }

    /// The usable images, oldest first.
    fn usable(&self) -> impl DoubleEndedIterator<Item = &CheckpointImage> {
        let is_in_whole_round = |number: u64| {
            let is_whole = self.whole_round.is_none_or(|newest| number <= newest);
            is_whole && !self.broken_rounds.contains(&number)
        };
        self.images.iter().filter(move |image| {
            let number = image.header.number;
            !self.unavailable_to.contains_key(&number) && is_in_whole_round(number)
        })
    }

    /// Locations of the newest [`KEPT_IMAGES`] usable images, oldest first, if they differ from the
    /// locations of the last call.
    pub fn new_locations(&mut self) -> Option<Vec<CheckpointLocation>> {
        let mut all: Vec<CheckpointLocation> =
            self.usable().rev().take(KEPT_IMAGES).map(CheckpointImage::location).collect();
        all.reverse();
        let is_new = all != self.reported_locations;
        self.reported_locations.clone_from(&all);
        is_new.then_some(all)
    }

    /// The image of a whole round, if it is kept.
    pub fn of_round(&self, number: u64) -> Option<&CheckpointImage> {
        self.usable().find(|image| image.header.number == number)
    }

    /// Numbers of the whole rounds of which the images are kept.
    pub fn rounds(&self) -> BTreeSet<u64> {
        self.usable().map(|image| image.header.number).collect()
    }

    /// A round has ended: all of its images are there, or it will never be whole.
    pub fn end_round(&mut self, number: u64, is_whole: bool) {
        match is_whole {
            true => self.whole_round = Some(number),
            false => drop(self.broken_rounds.insert(number)),
        }
        self.drop_surplus();
    }

    /// The unit has begun again with this round, so newer ones are of no use: one of their images
    /// cannot be used.
    pub fn break_rounds_after(&mut self, number: u64) {
        let numbers = self.images.iter().map(|image| image.header.number);
        self.broken_rounds.extend(numbers.filter(|newer| *newer > number));
        self.drop_surplus();
    }

    /// Whether the image of this number is kept, of whatever use it is.
    pub fn has(&self, number: u64) -> bool {
        self.images.iter().any(|image| image.header.number == number)
    }

    /// Drops the image of this number, which is torn.
    pub fn drop_image(&mut self, number: u64) {
        let is_it = |image: &CheckpointImage| image.header.number == number;
        let torn: Vec<CheckpointImage> =
            self.images.iter().filter(|image| is_it(image)).cloned().collect();
        self.discard(torn);
        self.images.retain(|image| !is_it(image));
        self.unavailable_to.remove(&number);
    }

    /// Number of determinants before which no incarnation of the rank will ever replay, because
    /// older images are deleted.
    pub fn trim_position(&mut self) -> u64 {
        let kept = self.oldest().map(|oldest| oldest.replay_position.determinants);
        self.is_trimmed |= kept.is_some();
        self.trimmed_to = self.trimmed_to.max(kept.unwrap_or(0));
        self.trimmed_to
    }

    /// Notes that something is trimmed that an incarnation from the start of the program needs.
    pub fn note_trimmed(&mut self) {
        self.is_trimmed = true;
    }

    /// Notes that the rank comes from another node: what that has put into the object store is
    /// deleted with the images of this node, and until then another node may need it.
    pub fn note_moved(&mut self, rank: u32) {
        self.moved_rank = Some(rank);
    }

    /// Whether an incarnation that starts with the program can replay to where the rank was.
    pub fn can_replay_from_start(&self) -> bool {
        self.trimmed_to == 0 && !self.is_trimmed
    }

    /// Numbers of the newest usable image and, if it is needed, of the one before.
    pub fn usable_numbers(&self) -> Option<(u64, Option<u64>)> {
        let newest = self.usable().next_back()?.header.number;
        Some((newest, self.oldest().map(|image| image.number)))
    }

    /// Header of the oldest needed image, if at least [`KEPT_IMAGES`] images are usable;
    /// with fewer the rank may have to replay from the start of the program.
    pub fn oldest(&self) -> Option<&ImageHeader> {
        self.usable().rev().nth(KEPT_IMAGES - 1).map(|image| &image.header)
    }

    /// Sets the nodes that the upload of an image has found unable to get it. False: the image is
    /// not kept any more, or was usable before.
    pub fn set_unavailable(&mut self, number: u64, to: &[u32]) -> bool {
        self.unavailable_to.get_mut(&number).map(|known| *known = to.to_vec()).is_some()
    }

    /// Marks images as usable that all of `spares`, the nodes which may take over the rank, can
    /// get; lost nodes do not matter. Deletes images that are not needed any more.
    pub fn recount_usable(&mut self, spares: &[u32]) {
        self.unavailable_to
            .retain(|_, unreachable| spares.iter().any(|spare| unreachable.contains(spare)));
        self.drop_surplus();
    }

    /// Deletes images that are not needed any more.
    pub fn drop_surplus(&mut self) {
        let newest = self.images.iter().rev().take(KEPT_IMAGES);
        let needed = newest.chain(self.usable().rev().take(KEPT_IMAGES));
        let needed: BTreeSet<u64> = needed.map(|image| image.header.number).collect();
        let all = std::mem::take(&mut self.images);
        let (kept, old): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|image| needed.contains(&image.header.number));
        self.images = kept.into();
        self.unavailable_to.retain(|number, _| needed.contains(number));
        self.broken_rounds.retain(|number| needed.contains(number));
        self.discard(old);
    }

    /// Deletes these images, on this node and in the object store.
    fn discard(&mut self, images: Vec<CheckpointImage>) {
        if images.is_empty() {
            return;
        }
        let here = images.clone();
        let bytes = images.iter().map(CheckpointImage::bytes).sum();
        self.removals.add(bytes, move || here.iter().for_each(CheckpointImage::remove));
        self.store_removals.retain(|removal| !removal.is_finished());
        self.store_removals.extend(self.remove_from_store(images, (None, None)));
    }

    /// Deletes all images, in the object store as well, and the folder `folder` of the rank in the
    /// folder `job`. The caller may stop waiting for the returned thread after a while; it says
    /// whether nothing is left in the store.
    pub fn remove_all(&mut self, folder: PathBuf, job: PathBuf) -> Option<JoinHandle<bool>> {
        let images: Vec<CheckpointImage> = std::mem::take(&mut self.images).into();
        // Images that were taken over lie in the folder of the other node.
        let folders = images.iter().filter_map(|image| image.folder.parent().map(PathBuf::from));
        let folders: BTreeSet<PathBuf> = folders.chain([folder]).collect();
        let removals = std::mem::take(&mut self.removals);
        let sending = self.stopped_upload.take();
        let mut store_removals = std::mem::take(&mut self.store_removals);
        store_removals.extend(self.remove_from_store(images, (sending, self.moved_rank)));
        let remove = move || {
            let all = || folders.iter().for_each(|folder| drop(std::fs::remove_dir_all(folder)));
            all();
            if removals.wait() {
                all();
            }
            // Removes the folder of the job if this folder was the last one in it.
            let _ = std::fs::remove_dir(job);
            let removed = store_removals.into_iter().map(|removal| removal.join().unwrap_or(false));
            removed.fold(true, |all, removed| all & removed)
        };
        disk_tasks::start("remove", remove).ok()
    }

    /// Removes images from the object store, once the upload thread `sending` has ended, and then
    /// all that is there of `moved_rank`.
    fn remove_from_store(
        &self,
        images: Vec<CheckpointImage>,
        (sending, moved_rank): (Option<UploadThread>, Option<u32>),
    ) -> Option<JoinHandle<bool>> {
        let object_store = self.object_store.as_ref()?.fresh();
        let remove = move || {
            sending.map(JoinHandle::join);
            let is_removed = images.iter().all(|image| object_store.remove(image));
            is_removed && moved_rank.is_none_or(|rank| object_store.remove_rank(rank))
        };
        disk_tasks::start("remove", remove).ok()
    }
}
