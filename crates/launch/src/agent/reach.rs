//! Whether the nodes that may take over ranks can use their images.
//!
//! Such a node says so where the images are: with a file in its folder of images (its claim), or with an object in the store, once it
//! has found CRIU to work and has read there what it has written. A node with ranks looks for that of each of them that is still
//! free and lives; which these are it hears from the agent above. So it is seen, and not believed.
//!
//! What may never happen: an image counts that a node cannot use which may have to; one that is lost holds up the others.

use std::thread::JoinHandle;

use anyhow::bail;

use super::Agent;
use crate::checkpoint::{Wish, claim, criu};
use crate::control::moved::Spares;
use crate::control::{Job, Message, Node};

impl Agent {
    /// Whether images of ranks are to be taken and can be; if not, the user hears why, once for each host.
    pub(super) fn wish(&mut self, job: &Job, node: &Node) -> Option<Wish> {
        let mut wish = Wish::find(&job.environment).filter(|_| super::groups::recovers(job))?;
        let name = own_claim(node);
        let spares = claims(node.cluster, &node.spares);
        wish.tool = criu::find(&wish.tool);
        let outcome = criu::check(&wish.tool)
            // Elsewhere its own word on the first image says it.
            .and_then(|()| if node.is_spare { criu::works(&wish.tool) } else { Ok(()) })
            .and_then(|()| wish.prepare(job, name, &spares));
        if let Err(error) = &outcome {
            let text = match node.is_spare {
                true => cannot_use(&node.name, error),
                false => format!(
                    "no checkpoints on node {}: {error:#}; a rank that is killed begins with the program",
                    node.name
                ),
            };
            self.parent.send(&Message::Note { text });
        }
        self.claim = outcome.ok();
        self.spares.clone_from(&node.spares);
        self.claim.is_some().then_some(wish)
    }

    /// A spare node says in the store that it reaches that.
    pub(super) fn begin_signing(&mut self, job: &Job, node: &Node) {
        let Some(remote) = self.spare_wish.as_ref().and_then(|wish| wish.remote.clone()) else {
            return;
        };
        let (job, name) = (job.id.clone(), own_claim(node));
        let sign = move || remote.sign(&job, name);
        self.signing = std::thread::Builder::new().name("sign".into()).spawn(sign).ok();
    }

    pub(super) fn advance_signing(&mut self) {
        let Some(thread) = self.signing.take_if(|thread| thread.is_finished()) else { return };
        let signed = thread.join().unwrap_or_else(|_| bail!("it has failed"));
        if let (Err(error), Some(own)) = (signed, &self.assignment) {
            let text = cannot_use(&own.node.name, &error.context("the store"));
            self.parent.send(&Message::Note { text });
        }
    }

    /// Takes that back, as the job ends; by a thread that may be left to itself after a while.
    pub(super) fn end_signing(&mut self) -> Option<JoinHandle<()>> {
        let (wish, own) = self.spare_wish.take().zip(self.assignment.as_ref())?;
        let remote = wish.remote?.anew();
        let (job, name, signing) = (own.job.id.clone(), own_claim(&own.node), self.signing.take());
        let remove = move || {
            signing.map(JoinHandle::join);
            remote.remove_sign(&job, name);
        };
        std::thread::Builder::new().name("remove".into()).spawn(remove).ok()
    }

    /// The agents below hear which nodes may still take ranks, when that has changed.
    pub(super) fn tell_spares(&mut self) {
        let is_taken = |place: usize| self.handovers.iter().any(|it| it.to == place);
        let all = self.children.iter().enumerate();
        let free = all.filter(|(place, child)| {
            child.node.is_spare && child.node.rank_count == 0 && !child.done && !is_taken(*place)
        });
        let names: Vec<String> = free.map(|(_, child)| child.node.name.clone()).collect();
        for child in self.children.iter_mut().filter(|child| !child.done) {
            child.process.link.send(&Message::Spares(Spares { names: names.clone() }));
        }
    }

    pub(super) fn handle_spares(&mut self, mut names: Vec<String>) {
        let Some(own) = &self.assignment else { return };
        names.retain(|name| *name != own.node.name);
        let claims = claims(own.node.cluster, &names);
        let keepers = self.ranks.iter_mut().filter_map(|rank| rank.keeper.as_mut());
        keepers.for_each(|keeper| keeper.set_spares(&claims));
        self.spare_wish.iter_mut().for_each(|wish| wish.spares.clone_from(&claims));
        self.spares = names;
    }

    /// The user hears once that images of this node are of no use to these others.
    pub(super) fn tell_blind(&mut self, blind: &[u32]) {
        let Some(own) = self.assignment.as_ref().filter(|_| !self.is_reach_told) else { return };
        let is_blind = |name: &&String| blind.contains(&claim::of_spare(own.node.cluster, name));
        let names: Vec<&str> = self.spares.iter().filter(is_blind).map(String::as_str).collect();
        if names.is_empty() {
            return;
        }
        self.is_reach_told = true;
        let has_store = Wish::find(&own.job.environment).is_some_and(|wish| wish.store.is_some());
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
        self.parent.send(&Message::Note { text });
    }
}

fn cannot_use(node: &str, error: &anyhow::Error) -> String {
    format!(
        "spare node {node} cannot use checkpoints: {error:#}; what begins there begins with the program, so all that ranks do is kept"
    )
}

/// Under which number it has its claim.
fn own_claim(node: &Node) -> u32 {
    if node.is_spare { claim::of_spare(node.cluster, &node.name) } else { node.first_rank }
}

fn claims(cluster: u32, names: &[String]) -> Vec<u32> {
    names.iter().map(|name| claim::of_spare(cluster, name)).collect()
}
