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

use anyhow::bail;

use super::Agent;
use crate::checkpoint::{CheckpointConfig, criu, lease};
use crate::control::rank_state::Spares;
use crate::control::{Job, Message, Node};

impl Agent {
    /// The checkpoint configuration, if images of ranks are to be taken and can be taken; if they
    /// cannot, the user is notified why, once for each host.
    pub(super) fn config(&mut self, job: &Job, node: &Node) -> Option<CheckpointConfig> {
        let mut config =
            CheckpointConfig::find(&job.environment).filter(|_| super::groups::recovers(job))?;
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
                    "no checkpoints on node {}: {error:#}; a rank that is killed begins with the program",
                    node.name
                ),
            };
            self.parent.note(text);
        }
        self.images.lease = outcome.ok();
        self.failover.spares.clone_from(&node.spares);
        self.images.lease.is_some().then_some(config)
    }

    /// Starts to announce in the object store that this spare node reaches the object store.
    pub(super) fn begin_announcing(&mut self, job: &Job, node: &Node) {
        let Some(object_store) =
            self.images.spare_config.as_ref().and_then(|config| config.object_store.clone())
        else {
            return;
        };
        let (job, name) = (job.id.clone(), own_lease(node));
        let announce = move || object_store.announce_spare(&job, name);
        self.images.announcing =
            std::thread::Builder::new().name("sign".into()).spawn(announce).ok();
    }

    pub(super) fn advance_announcing(&mut self) {
        let Some(thread) = self.images.announcing.take_if(|thread| thread.is_finished()) else {
            return;
        };
        let announced = thread.join().unwrap_or_else(|_| bail!("it has failed"));
        if let (Err(error), Some(own)) = (announced, &self.parent.assignment) {
            let text = cannot_use(&own.node.name, &error.context("the store"));
            self.parent.note(text);
        }
    }

    /// Withdraws the announcement, as the job ends. The caller may stop waiting for the returned
    /// thread after a while.
    pub(super) fn end_announcing(&mut self) -> Option<JoinHandle<()>> {
        let (config, own) = self.images.spare_config.take().zip(self.parent.assignment.as_ref())?;
        let object_store = config.object_store?.fresh();
        let (job, name, announcing) =
            (own.job.id.clone(), own_lease(&own.node), self.images.announcing.take());
        let remove = move || {
            announcing.map(JoinHandle::join);
            object_store.withdraw_spare(&job, name);
        };
        std::thread::Builder::new().name("remove".into()).spawn(remove).ok()
    }

    /// Sends the agents below the names of the nodes that may still take over ranks, after a
    /// change.
    pub(super) fn send_spares(&mut self) {
        let is_taken = |place: usize| self.failover.transfers.iter().any(|it| it.to == place);
        let all = self.children.iter().enumerate();
        let free = all.filter(|(place, child)| {
            child.node.is_spare && child.node.rank_count == 0 && !child.done && !is_taken(*place)
        });
        let names: Vec<String> = free.map(|(_, child)| child.node.name.clone()).collect();
        for child in self.children.iter_mut().filter(|child| !child.done) {
            child.process.stream.send(&Message::Spares(Spares { names: names.clone() }));
        }
    }

    pub(super) fn handle_spares(&mut self, mut names: Vec<String>) {
        let Some(own) = &self.parent.assignment else { return };
        names.retain(|name| *name != own.node.name);
        let leases = leases(own.node.cluster, &names);
        let schedulers = self.ranks.iter_mut().filter_map(|rank| rank.scheduler.as_mut());
        schedulers.for_each(|scheduler| scheduler.set_spares(&leases));
        self.images.spare_config.iter_mut().for_each(|config| config.spares.clone_from(&leases));
        self.failover.spares = names;
    }

    /// Notifies the user once that these nodes cannot use the images of this node.
    pub(super) fn report_unreachable(&mut self, unreachable: &[u32]) {
        let Some(own) =
            self.parent.assignment.as_ref().filter(|_| !self.images.is_reachability_reported)
        else {
            return;
        };
        let is_unreachable =
            |name: &&String| unreachable.contains(&lease::spare_number(own.node.cluster, name));
        let names: Vec<&str> =
            self.failover.spares.iter().filter(is_unreachable).map(String::as_str).collect();
        if names.is_empty() {
            return;
        }
        self.images.is_reachability_reported = true;
        let has_store = CheckpointConfig::find(&own.job.environment)
            .is_some_and(|config| config.object_store_url.is_some());
        let until = match has_store {
            true => "these have CRIU and reach the store (its variables go there with -x)",
            false => {
                "these have CRIU, and checkpoint_dir is a folder that every node sees, or s3://BUCKET/PREFIX"
            }
        };
        let text = format!(
            "checkpoints of node {} are on it alone: spare nodes cannot use them ({}); all that its ranks do is kept \
             (recover_memory), until {until}",
            own.node.name,
            names.join(", ")
        );
        self.parent.note(text);
    }
}

fn cannot_use(node: &str, error: &anyhow::Error) -> String {
    format!(
        "spare node {node} cannot use checkpoints: {error:#}; what begins there begins with the program, so all that ranks do is kept"
    )
}

/// The number of this node's lease file.
fn own_lease(node: &Node) -> u32 {
    if node.is_spare { lease::spare_number(node.cluster, &node.name) } else { node.first_rank }
}

fn leases(cluster: u32, names: &[String]) -> Vec<u32> {
    names.iter().map(|name| lease::spare_number(cluster, name)).collect()
}
