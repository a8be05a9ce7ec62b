//! Detects an allocation of a batch system in which the user starts a job without naming hosts: all
//! ranks run on this host, though several hosts were allocated. The module is pure: variables
//! enter, advice leaves.

use std::collections::BTreeSet;

/// The advice that the user should read if an allocation of several hosts is not used. `variable`
/// gives the value of an environment variable of this process; `read` gives the text of a file.
pub fn advice(
    variable: impl Fn(&str) -> Option<String>,
    read: impl Fn(&str) -> Option<String>,
) -> Option<String> {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty());
    let number = |name: &str| set(name).and_then(|text| text.trim().parse::<usize>().ok());
    // The first word of each line names a host; a host may have a line for each of its slots.
    let hosts_in = |name: &str| {
        let text = set(name).and_then(|file| read(&file)).unwrap_or_default();
        let names = text.lines().filter_map(|line| line.split_ascii_whitespace().next());
        names.collect::<BTreeSet<_>>().len()
    };
    let several = |count: usize| Some(count).filter(|count| *count > 1);
    let found = None
        .or_else(|| {
            let job = set("SLURM_JOB_ID")?;
            let count = number("SLURM_JOB_NUM_NODES").or(number("SLURM_NNODES"))?;
            let how = "--hosts \"$(scontrol show hostnames | paste -sd,)\" --ranks-per-node N";
            Some((format!("Slurm job {job}"), several(count)?, how))
        })
        .or_else(|| {
            let job = set("PBS_JOBID")?;
            let how = "--hostfile \"$PBS_NODEFILE\"";
            Some((format!("PBS job {job}"), several(hosts_in("PBS_NODEFILE"))?, how))
        })
        .or_else(|| {
            let job = set("LSB_JOBID")?;
            let how = "--hostfile \"$LSB_DJOB_HOSTFILE\"";
            Some((format!("LSF job {job}"), several(hosts_in("LSB_DJOB_HOSTFILE"))?, how))
        })
        .or_else(|| {
            let count = several(hosts_in("PE_HOSTFILE"))?;
            let how = "--hosts \"$(awk '{print $1 \":\" $2}' \"$PE_HOSTFILE\" | paste -sd,)\"";
            Some((format!("Grid Engine job {}", set("JOB_ID")?), count, how))
        });
    let (job, count, how) = found?;
    Some(format!(
        "this is {job} with {count} nodes, and all ranks start on this one: Landbridge does not \
         read the allocation by itself. To use all nodes (by ssh): {how}; to stay on this node \
         without this line: --hosts localhost"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn advice_for(variables: &[(&str, &str)]) -> String {
        let variable = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| value.to_string())
        };
        let read = |file: &str| match file {
            "/nodes" => Some("n1\nn1\nn2\nn2\n".to_string()),
            "/one" => Some("n1\nn1\n".to_string()),
            "/pe" => Some("n1 4 all.q UNDEFINED\nn2 4 all.q UNDEFINED\n".to_string()),
            _ => None,
        };
        advice(variable, read).unwrap_or_default()
    }

    #[test]
    fn allocations_of_several_nodes_are_reported_with_advice() {
        let slurm = advice_for(&[("SLURM_JOB_ID", "77"), ("SLURM_JOB_NUM_NODES", "4")]);
        assert!(slurm.starts_with("this is Slurm job 77 with 4 nodes"), "{slurm}");
        assert!(slurm.contains("--hosts \"$(scontrol show hostnames"), "{slurm}");
        let older = advice_for(&[("SLURM_JOB_ID", "77"), ("SLURM_NNODES", "2")]);
        assert!(older.contains("with 2 nodes"), "{older}");
        let pbs = advice_for(&[("PBS_JOBID", "5.srv"), ("PBS_NODEFILE", "/nodes")]);
        assert!(pbs.contains("PBS job 5.srv with 2 nodes"), "{pbs}");
        let lsf = advice_for(&[("LSB_JOBID", "5"), ("LSB_DJOB_HOSTFILE", "/nodes")]);
        assert!(lsf.contains("--hostfile \"$LSB_DJOB_HOSTFILE\""), "{lsf}");
        let engine = advice_for(&[("JOB_ID", "5"), ("PE_HOSTFILE", "/pe")]);
        assert!(engine.contains("Grid Engine job 5 with 2 nodes"), "{engine}");
    }

    #[test]
    fn one_node_is_no_news() {
        assert_eq!(advice_for(&[]), "");
        assert_eq!(advice_for(&[("SLURM_JOB_ID", "77"), ("SLURM_JOB_NUM_NODES", "1")]), "");
        assert_eq!(advice_for(&[("SLURM_JOB_NUM_NODES", "4")]), "");
        assert_eq!(advice_for(&[("PBS_JOBID", "5"), ("PBS_NODEFILE", "/one")]), "");
        assert_eq!(advice_for(&[("PBS_JOBID", "5"), ("PBS_NODEFILE", "/missing")]), "");
    }
}
