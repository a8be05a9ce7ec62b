//! A list of links that are to be served in turn, each at most once.
//!
//! What enters: links that have work. What leaves: the same links, in the order in which they
//! entered. What may never happen: a link is twice in the list, unless its number was used again
//! for another link meanwhile.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::route::routing_table::LinkId;

/// A list of links: see the module head.
#[derive(Debug, Default)]
pub(super) struct LinkQueue {
    order: VecDeque<LinkId>,
    /// Whether each link is in the list, by the number of the link.
    members: Vec<bool>,
}

impl LinkQueue {
    /// Appends a link, unless the link is in the list.
    #[inline]
    pub fn push(&mut self, link: LinkId) {
        let number = link.0 as usize;
        if number >= self.members.len() {
            self.members.resize(number + 1, false);
        }
        if !self.members[number] {
            self.members[number] = true;
            self.order.push_back(link);
        }
    }

    /// Removes the first link.
    #[inline]
    pub fn pop(&mut self) -> Option<LinkId> {
        let link = self.order.pop_front()?;
        self.members[link.0 as usize] = false;
        Some(link)
    }

    pub fn front(&self) -> Option<LinkId> {
        self.order.front().copied()
    }

    /// Moves the first link to the end.
    pub fn rotate(&mut self) {
        if let Some(link) = self.order.pop_front() {
            self.order.push_back(link);
        }
    }

    /// Handles the end of a link, whose number another link may use next. The entry of the closed
    /// link keeps its place in the list, and the reader of the list skips this entry if no other
    /// link uses the number by then.
    pub fn handle_closed(&mut self, link: LinkId) {
        if let Some(is_member) = self.members.get_mut(link.0 as usize) {
            *is_member = false;
        }
    }

    pub fn len(&self) -> usize {
        self.order.len()
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_take_turns_and_none_is_listed_twice() {
        let mut list = LinkQueue::default();
        for number in [2, 0, 2, 1, 0] {
            list.push(LinkId(number));
        }
        assert_eq!(list.len(), 3);
        list.rotate();
        assert_eq!(list.front(), Some(LinkId(0)));
        list.push(LinkId(2));
        let order: Vec<_> = core::iter::from_fn(|| list.pop()).collect();
        assert_eq!(order, [LinkId(0), LinkId(1), LinkId(2)]);
        list.push(LinkId(1));
        list.handle_closed(LinkId(1));
        list.push(LinkId(1));
        assert_eq!(list.len(), 2, "the number belongs to another link now");
    }
}
