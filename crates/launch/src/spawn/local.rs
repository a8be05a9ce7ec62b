//! A host on which this machine can run programs directly: this machine itself, or the target of a
//! command prefix (`nsenter …`, `docker exec -i …`).

use super::Spawn;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LocalSpawn {
    pub prefix: Vec<String>,
}

impl Spawn for LocalSpawn {
    fn command(&self, _host: &str, agent: &[String]) -> Vec<String> {
        self.prefix.iter().chain(agent).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefix_comes_first() {
        let local = LocalSpawn { prefix: vec!["nsenter".into(), "--".into()] };
        let agent = ["landbridge".to_string(), "agent".to_string()];
        assert_eq!(local.command("n1", &agent), ["nsenter", "--", "landbridge", "agent"]);
    }
}
