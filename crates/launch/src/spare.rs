//! Chooses the spare node that takes the ranks of a lost node. The module is pure.
//!
//! In: the spare nodes of the cluster, and the number of ranks. Out: one spare node. A node that
//! has taken ranks is no spare node any more.

/// A node that is kept free of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spare {
    /// The node's position among the nodes of its cluster.
    pub place: usize,
    pub slots: u32,
}

/// Chooses the spare node with the fewest slots that are enough, so that larger nodes stay free for
/// more ranks. If no spare node is large enough, the largest is chosen: ranks that share processors
/// make progress, and a job that ends does not.
pub fn choose(spares: &[Spare], ranks: u32) -> Option<Spare> {
    let enough = spares.iter().filter(|spare| spare.slots >= ranks).min_by_key(|spare| spare.slots);
    let largest = || spares.iter().rev().max_by_key(|spare| spare.slots);
    enough.or_else(largest).copied()
}

/// What follows when a rank cannot be started on its present node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailedStartAction {
    /// All ranks of the node move to another node, because the fault of the node would also stop
    /// the other ranks.
    Elsewhere,
    /// The job ends, for this reason.
    GiveUp(&'static str),
}

/// Decides what follows a failed start. `has_moved_before` says that the start also failed on
/// another node; then the node is not the reason.
pub fn after_failed_start(has_moved_before: bool, is_spare_free: bool) -> FailedStartAction {
    match (has_moved_before, is_spare_free) {
        (true, _) => FailedStartAction::GiveUp("it could not be started on another node either"),
        (false, false) => FailedStartAction::GiveUp("there is no spare node left"),
        (false, true) => FailedStartAction::Elsewhere,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_that_is_large_enough_or_the_largest() {
        let spares: Vec<Spare> =
            [2, 8, 4, 4].iter().zip(3..).map(|(&slots, place)| Spare { place, slots }).collect();
        let place = |ranks| choose(&spares, ranks).map(|spare| spare.place);
        assert_eq!([1, 2, 3, 4, 5, 8].map(place), [3, 3, 5, 5, 4, 4].map(Some));
        assert_eq!(place(9), Some(4));
        assert_eq!(choose(&[], 1), None);
    }

    #[test]
    fn who_cannot_be_started_goes_elsewhere_once() {
        assert_eq!(after_failed_start(false, true), FailedStartAction::Elsewhere);
        for (has_moved_before, is_free) in [(false, false), (true, true), (true, false)] {
            assert!(matches!(
                after_failed_start(has_moved_before, is_free),
                FailedStartAction::GiveUp(_)
            ));
        }
    }
}
