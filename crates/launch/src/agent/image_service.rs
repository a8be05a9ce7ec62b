//! Whether the nodes that may take over ranks can use the checkpoint images of these ranks.
//!
//! A spare node shows this where the images lie, after it has checked that CRIU works: with its
//! lease file in the folder of images, or with an object in the object store, after it has read
//! back what it has written there. A node with ranks checks these signs for each spare node that is
//! still free and alive; the agent above sends the list of such nodes. So the check relies on what
//! is visible to the node with ranks, and not on a message of the spare node.
//!
//! What may never happen: an image counts as usable that a node cannot use which may have to; a
//! lost spare node keeps images from being usable.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::parent_agent::ParentAgent;
use crate::checkpoint::lease::Lease;
use crate::checkpoint::{CheckpointConfig, criu, lease};
use crate::control::{Assignment, Job, Node};
use crate::mpi;

/// Where checkpoint images of ranks are kept, and which other nodes see them.
#[derive(Default)]
pub struct ImageService {
    /// Names of the nodes that may take over ranks of this node.
    pub spares: Vec<String>,
    /// Lease on the folder of checkpoint images.
    pub lease: Option<Lease>,
    /// The checkpoint configuration for ranks that may move to this node.
    pub spare_config: Option<CheckpointConfig>,
    /// Thread in which a spare node announces in the object store that it reaches the object store.
    pub announcing: Option<JoinHandle<Result<()>>>,
    /// The images that are being deleted at the end of the job.
    pub removals: Option<ImageRemovals>,
    /// The object store has refused the last image.
    pub is_store_gone: bool,
    /// The agent has reported that other nodes do not see the images of this node.
    pub is_reachability_reported: bool,
}

/// Threads that delete images at the end of the job.
pub struct ImageRemovals {
    /// Each says whether it has deleted all.
    pub images: Vec<JoinHandle<bool>>,
    pub announcement: Option<JoinHandle<()>>,
    /// What is not deleted by then stays.
    pub deadline: Instant,
}

impl ImageRemovals {
    /// Waits for the threads; returns whether all images are deleted.
    pub fn wait(self) -> bool {
        let is_over = |removals: &ImageRemovals| {
            removals.images.iter().all(JoinHandle::is_finished)
                && removals.announcement.as_ref().is_none_or(JoinHandle::is_finished)
        };
        while Instant::now() < self.deadline && !is_over(&self) {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.images.into_iter().all(|it| it.is_finished() && it.join().unwrap_or(false))
    }
}

impl ImageService {
    /// The checkpoint configuration, if images of ranks are to be taken and can be taken; if they
    /// cannot, the user is notified why, once for each host.
    pub fn config(
        &mut self,
        job: &Job,
        node: &Node,
        parent: &mut ParentAgent,
    ) -> Option<CheckpointConfig> {
        let mut config =
            CheckpointConfig::find(&job.environment).filter(|_| mpi::recovers(&job.environment))?;
        let name = own_lease(node);
        let spares = leases(node.cluster, &node.spares);
        config.tool = criu::find(&config.tool);
        let outcome = criu::check(&config.tool)
            .and_then(|()| criu::works(&config.tool))
            .and_then(|()| config.prepare(job, name, &spares));
        if let Err(error) = &outcome {
            let text = match node.is_spare {
                true => cannot_use(&node.name, error),
                false => format!(
                    "no checkpoints on node {}: {error:#}; a killed rank replays from the \
                     beginning of the program",
                    node.name
                ),
            };
            parent.note(text);
        }
        self.lease = outcome.ok();
        self.spares.clone_from(&node.spares);
        self.lease.is_some().then_some(config)
    }

    /// Starts to announce in the object store that this spare node reaches the object store.
    pub fn begin_announcing(&mut self, job: &Job, node: &Node) {
        let Some(object_store) =
            self.spare_config.as_ref().and_then(|config| config.object_store.clone())
        else {
            return;
        };
        let (job, name) = (job.id.clone(), own_lease(node));
        let announce = move || object_store.announce_spare(&job, name);
        self.announcing = std::thread::Builder::new().name("sign".into()).spawn(announce).ok();
    }

    pub fn advance_announcing(&mut self, parent: &mut ParentAgent) {
        let Some(thread) = self.announcing.take_if(|thread| thread.is_finished()) else {
            return;
        };
        let announced = thread.join().unwrap_or_else(|_| bail!("it has failed"));
        if let (Err(error), Some(own)) = (announced, &parent.assignment) {
            let text = cannot_use(&own.node.name, &error.context("the store"));
            parent.note(text);
        }
    }

    /// Withdraws the announcement, as the job ends. The caller may stop waiting for the returned
    /// thread after a while.
    pub fn end_announcing(&mut self, own: Option<&Assignment>) -> Option<JoinHandle<()>> {
        let (config, own) = self.spare_config.take().zip(own)?;
        let object_store = config.object_store?.fresh();
        let (job, name, announcing) =
            (own.job.id.clone(), own_lease(&own.node), self.announcing.take());
        let remove = move || {
            announcing.map(JoinHandle::join);
            object_store.withdraw_spare(&job, name);
        };
        std::thread::Builder::new().name("remove".into()).spawn(remove).ok()
    }

    /// Takes the names of the nodes that may still take over ranks of this node; returns the
    /// numbers of their lease files.
    pub fn handle_spares(&mut self, mut names: Vec<String>, own: &Assignment) -> Vec<u32> {
        names.retain(|name| *name != own.node.name);
        let leases = leases(own.node.cluster, &names);
        self.spare_config.iter_mut().for_each(|config| config.spares.clone_from(&leases));
        self.spares = names;
        leases
    }

    /// Notifies the user once that these nodes cannot use the images of this node.
    pub fn report_unreachable(&mut self, unreachable: &[u32], parent: &mut ParentAgent) {
        let Some(own) = parent.assignment.as_ref().filter(|_| !self.is_reachability_reported)
        else {
            return;
        };
        let is_unreachable =
            |name: &&String| unreachable.contains(&lease::spare_number(own.node.cluster, name));
        let names: Vec<&str> =
            self.spares.iter().filter(is_unreachable).map(String::as_str).collect();
        if names.is_empty() {
            return;
        }
        self.is_reachability_reported = true;
        let has_store = CheckpointConfig::find(&own.job.environment)
            .is_some_and(|config| config.object_store_url.is_some());
        let until = match has_store {
            true => "these have CRIU and reach the store (its variables go there with -x)",
            false => {
                "these have CRIU, and checkpoint_dir is a folder that every node sees, or \
                 s3://BUCKET/PREFIX"
            }
        };
        let text = format!(
            "checkpoints of node {} are on it alone: spare nodes cannot use them ({}); no message \
             log is trimmed (recover_memory) until {until}",
            own.node.name,
            names.join(", ")
        );
        parent.note(text);
    }

    /// Notes to the user once when the object store refuses images, and once when the object store
    /// takes images again.
    pub fn report_store_state(
        &mut self,
        name: &str,
        uploaded: Result<()>,
        parent: &mut ParentAgent,
    ) {
        let was_gone = std::mem::replace(&mut self.is_store_gone, uploaded.is_err());
        let text = match uploaded {
            Err(error) if !was_gone => format!(
                "{name} is on its node alone: the store has not taken it: {error:#}; further \
                 failures are not reported"
            ),
            Ok(()) if was_gone => format!("the store takes checkpoints again: {name} is there"),
            _ => return,
        };
        parent.note(text);
    }
}

fn cannot_use(node: &str, error: &anyhow::Error) -> String {
    format!(
        "spare node {node} cannot use checkpoints: {error:#}; ranks that move there replay from \
         the beginning of the program, so no message log is trimmed"
    )
}

/// The number of this node's lease file.
fn own_lease(node: &Node) -> u32 {
    if node.is_spare { lease::spare_number(node.cluster, &node.name) } else { node.first_rank }
}

fn leases(cluster: u32, names: &[String]) -> Vec<u32> {
    names.iter().map(|name| lease::spare_number(cluster, name)).collect()
}
