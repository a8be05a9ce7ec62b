//! The key-value space of a process group, as one agent sees it.
//!
//! A key that a local rank puts is visible to the local ranks at once, and waits in `fresh` until
//! the next barrier carries it up the tree. Keys of other nodes arrive with the barrier's release.
//! A key does not change once all agents have it: a later put of the same key replaces it only on
//! the agents that a barrier brings it to, as in MPICH's own launcher.

use std::collections::HashMap;

/// Keys and values that a barrier message carries.
pub type Delta = Vec<(String, String)>;

#[derive(Default)]
pub struct Kvs {
    keys: HashMap<String, String>,
    fresh: Delta,
}

impl Kvs {
    pub fn put(&mut self, key: &str, value: &str) {
        self.keys.insert(key.to_string(), value.to_string());
        self.fresh.push((key.to_string(), value.to_string()));
    }

    pub fn value(&self, key: &str) -> Option<&str> {
        self.keys.get(key).map(String::as_str)
    }

    /// Adds keys that an agent below has collected, for the next message up.
    pub fn add_fresh(&mut self, delta: Delta) {
        self.fresh.extend(delta);
    }

    /// Takes the keys that the next message up carries.
    pub fn take_fresh(&mut self) -> Delta {
        std::mem::take(&mut self.fresh)
    }

    /// Every key that is known here.
    pub fn all(&self) -> Delta {
        self.keys.iter().map(|(key, value)| (key.clone(), value.clone())).collect()
    }

    /// Adds the keys of the whole group that a barrier's release brings.
    pub fn merge(&mut self, delta: &Delta) {
        self.keys.extend(delta.iter().cloned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_put_is_seen_at_once_and_travels_once() {
        let mut kvs = Kvs::default();
        kvs.put("a", "1");
        assert_eq!(kvs.value("a"), Some("1"));
        assert_eq!(kvs.take_fresh(), [("a".to_string(), "1".to_string())]);
        assert!(kvs.take_fresh().is_empty());
    }

    #[test]
    fn keys_of_an_agent_below_are_seen_only_after_the_release() {
        let mut kvs = Kvs::default();
        let delta = vec![("b".to_string(), "2".to_string())];
        kvs.add_fresh(delta.clone());
        assert_eq!(kvs.value("b"), None);
        kvs.merge(&delta);
        assert_eq!(kvs.value("b"), Some("2"));
    }
}
