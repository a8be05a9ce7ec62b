//! Turns the command line of `landbridge run` into a job that can start.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use landbridge_proto::setting::{self, RECOVER_LOG, RECOVER_UNIT};
use rustix::process::{Resource, getrlimit};

use crate::allocation;
use crate::applications::{self, exported};
use crate::cli::{Restarted, RunArguments};
use crate::control::spawn_order::Application;
use crate::control::{Job, Node};
use crate::hosts;
use crate::local::{self, LocalWishes};
use crate::local_transport::LocalTransport;
use crate::message_logs::{self, LogWishes};
use crate::mpi::{PROVIDER, transport_variables};
use crate::own_lines::own_lines;
use crate::plan::{self, Wishes};
use crate::relays::Relays;
use crate::restart::RestartLimits;
use crate::run;
use crate::settings::{Flag, Settings, show};
use crate::sys;
use crate::topology::{Topology, topology_file};

/// Runs the job and returns its exit code.
pub fn run(mut arguments: RunArguments) -> Result<i32> {
    let others = applications::split(&mut arguments)?;
    let arguments = &arguments;
    let settings = settings(arguments)?;
    check_goes_with_recover(arguments, settings.recovers())?;
    let topology = topology(arguments, settings.recovers())?;
    let wishes = Wishes {
        ranks: arguments.ranks,
        ranks_per_node: arguments.ranks_per_node,
        ranks_per_cluster: arguments.ranks_per_cluster,
        recovers: settings.recovers(),
        spares: arguments.spares.unwrap_or(0),
        moves_ranks: arguments.recover == Some(Restarted::Node),
    };
    let agent = std::env::current_exe().context("cannot find out where landbridge itself is")?;
    let id = sys::random_hex(32)?;
    let plan = plan::plan(&topology, &wishes, &agent.display().to_string(), &id)?;
    let applications = others.applications(arguments, plan.size)?;
    check_transport(arguments, &applications, &plan)?;
    tell_of_allocation(arguments);
    if arguments.verbose {
        plan.nodes.iter().for_each(describe);
    }
    check_recovery(&settings, &plan)?;
    check_spares(&wishes, &plan)?;
    if settings.lacks_clocks_for_images() {
        bail!(
            "checkpoints need recover_clocks=on: a rank is asked for its checkpoint by a word in \
             that record (or run without checkpoint)"
        );
    }
    let job = job(arguments, applications, id, &plan, &settings)?;
    let relays = Relays::new(&job, &plan, settings.peer_timeout())?;
    run::run(job, plan.nodes, relays, options(arguments)?)
}

/// Recovery needs a relay, because the relay holds the message logs of ranks.
fn check_recovery(settings: &Settings, plan: &plan::Plan) -> Result<()> {
    if plan.relays.is_empty() && settings.recovers() {
        bail!(
            "--recover needs a relay, which keeps their message logs: let the topology name one, \
             in [cluster.relay]; see docs/RECOVERY.md"
        );
    }
    Ok(())
}

/// Who logs messages of ranks that may be restarted, as the variable that says it to all processes
/// of the job.
fn message_logs(
    settings: &Settings,
    plan: &plan::Plan,
    is_verbose: bool,
) -> Result<Option<(String, String)>> {
    if !settings.recovers() {
        return Ok(None);
    }
    let logger = message_logs::choose(LogWishes {
        log: settings.text(&RECOVER_LOG),
        unit: settings.text(&RECOVER_UNIT),
        ranks: plan.size,
        has_spares: plan.has_spares(),
        records_clocks: settings.records_clocks(),
        has_limits: [Resource::As, Resource::Fsize]
            .into_iter()
            .any(|limit| getrlimit(limit).current.is_some()),
    })?;
    if is_verbose {
        eprintln!("landbridge: messages are logged with recover_log={logger}");
    }
    Ok(Some((RECOVER_LOG.variable(), logger.into())))
}

/// Options that say how ranks are restarted need `--recover`.
fn check_goes_with_recover(arguments: &RunArguments, recovers: bool) -> Result<()> {
    let no_restart = "without it no rank is restarted";
    let options = [
        ("--spares", arguments.spares.is_some_and(|hosts| hosts > 0), no_restart),
        (
            "--checkpoint",
            arguments.checkpoint.is_some(),
            "without it no rank is restarted from a checkpoint",
        ),
        ("--max-restarts", arguments.max_restarts.is_some(), no_restart),
        ("--max-restarts-within", arguments.max_restarts_within.is_some(), no_restart),
    ];
    match options.iter().find(|(_, is_given, _)| *is_given) {
        Some((option, _, why)) if !recovers => {
            bail!("{option} goes with --recover: {why}; add --recover, or leave {option} out")
        }
        _ => Ok(()),
    }
}

/// `--spares` and `--recover=node` need at least one host that can be kept free.
fn check_spares(wishes: &Wishes, plan: &plan::Plan) -> Result<()> {
    match wishes.spares_option() {
        Some(option) if !plan.has_spares() => bail!(
            "{option}: no host can be kept free, for each cluster has but one, and that is its \
             relay's; see docs/RECOVERY.md"
        ),
        _ => Ok(()),
    }
}

/// No variable that `-x` sets may lead messages past Landbridge, unless the user wants another
/// provider for comparison.
fn check_transport(
    arguments: &RunArguments,
    applications: &[Application],
    plan: &plan::Plan,
) -> Result<()> {
    if let Some(provider) = &arguments.provider {
        if arguments.verbose && !plan.relays.is_empty() && provider != PROVIDER {
            eprintln!(
                "landbridge: --provider {provider}: messages go by it, and past the relays of this \
                 job"
            );
        }
        return Ok(());
    }
    let mut said = applications.iter().flat_map(|it| &it.task.environment);
    match said.find_map(|(name, value)| transport_variables::refusal(name, value, plan.nodes.len()))
    {
        Some(text) => bail!(text),
        None => Ok(()),
    }
}

/// Prints advice if a batch system has allocated hosts that this job does not use.
fn tell_of_allocation(arguments: &RunArguments) {
    let is_placed = arguments.clusters.is_some()
        || !arguments.hosts.is_empty()
        || arguments.hostfile.is_some()
        || topology_file(arguments.topology.as_deref()).is_some();
    let variable = |name: &str| std::env::var(name).ok();
    let read = |file: &str| std::fs::read_to_string(file).ok();
    if let Some(text) = allocation::advice(variable, read).filter(|_| !is_placed) {
        eprint!("{}", own_lines(&text));
    }
}

/// The name of this machine.
pub fn here() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn topology(arguments: &RunArguments, recovers: bool) -> Result<Topology> {
    if let Some(clusters) = arguments.clusters {
        let ranks = arguments.ranks.context("say how many ranks with -n")?;
        return hosts::cut(&here(), clusters, ranks);
    }
    if !arguments.hosts.is_empty() {
        let list = hosts::parse_list(&arguments.hosts).context("--hosts")?;
        return Ok(hosts::topology(list, &here(), recovers));
    }
    if let Some(file) = &arguments.hostfile {
        let list = hosts::parse_file(&read(file)?).with_context(|| file.display().to_string())?;
        return Ok(hosts::topology(list, &here(), recovers));
    }
    if let Some(file) = topology_file(arguments.topology.as_deref()) {
        return Topology::parse(&read(&file)?).with_context(|| file.display().to_string());
    }
    if arguments.ranks.is_none() && arguments.ranks_per_node.is_none() {
        bail!("say how many ranks with -n");
    }
    if let (true, Some(ranks)) = (recovers, arguments.ranks) {
        // The relay holds the data that a killed rank needs for its restart.
        return hosts::cut(&here(), 1, ranks);
    }
    Ok(hosts::topology(vec![(here(), None)], &here(), recovers))
}

fn settings(arguments: &RunArguments) -> Result<Settings> {
    let has_topology =
        arguments.clusters.is_none() && arguments.hosts.is_empty() && arguments.hostfile.is_none();
    let topology = topology_file(arguments.topology.as_deref()).filter(|_| has_topology);
    let mut special = Vec::new();
    if arguments.recover.is_some() {
        special.push(Flag::special("--recover", &setting::RECOVER, "on")?);
    }
    if let Some(every) = &arguments.checkpoint {
        special.push(Flag::special("--checkpoint", &setting::CHECKPOINT, every)?);
    }
    let (options, exported) = (&arguments.settings, exported(&arguments.environment)?);
    let settings = Settings::find_with(options, special, &exported, topology.as_deref())?;
    show::warn_of_misspelt();
    if arguments.verbose {
        for it in settings.changed() {
            eprintln!("landbridge: setting {} = {} ({})", it.row.name, it.text, it.source);
        }
    }
    Ok(settings)
}

fn read(file: &Path) -> Result<String> {
    std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))
}

fn job(
    arguments: &RunArguments,
    applications: Vec<Application>,
    id: String,
    plan: &plan::Plan,
    settings: &Settings,
) -> Result<Job> {
    let mut environment = passed_on(std::env::vars_os());
    environment.extend(exported(&arguments.environment)?);
    environment.extend(settings.variables());
    environment.extend(message_logs(settings, plan, arguments.verbose)?);
    Ok(Job {
        kvsname: format!("kvs_{id}"),
        id,
        key: sys::random_hex(64)?,
        size: plan.size,
        universe: plan.universe(),
        mapping: plan.mapping.clone(),
        applications,
        provider: arguments.provider.clone(),
        environment: environment.into_iter().collect(),
        verbose: arguments.verbose,
        limits: limits(arguments),
        has_spares: plan.has_spares(),
        local: local(settings, plan)?,
    })
}

fn local(settings: &Settings, plan: &plan::Plan) -> Result<LocalTransport> {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
    let wishes = LocalWishes {
        local: settings.text(&setting::LOCAL),
        sets_paths: settings.is_set_by_user(&setting::PATHS),
        records: settings.recovers(),
    };
    local::choose(wishes, &plan.nodes, cores)
}

fn limits(arguments: &RunArguments) -> RestartLimits {
    let RestartLimits { restarts_max, within_s } = RestartLimits::default();
    RestartLimits {
        restarts_max: arguments.max_restarts.unwrap_or(restarts_max),
        within_s: arguments.max_restarts_within.unwrap_or(within_s),
    }
}

fn options(arguments: &RunArguments) -> Result<run::Options> {
    let open = |path: &std::path::PathBuf| {
        std::fs::File::create(path).with_context(|| format!("cannot write {}", path.display()))
    };
    Ok(run::Options {
        label: arguments.label,
        verbose: arguments.verbose,
        timeout: arguments.timeout.map(Duration::from_secs),
        relay_log: arguments.relay_log.as_ref().map(open).transpose()?,
    })
}

/// Variables that belong to this login, terminal or machine and have no meaning on another host. A
/// name that ends in '*' stands for all names that begin with the part before the '*'.
const STAYS_HERE: [&str; 29] = [
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "MAIL",
    "PWD",
    "OLDPWD",
    "SHLVL",
    "_",
    "TERM",
    "DISPLAY",
    "HOSTNAME",
    "TMPDIR",
    "TMP",
    "TEMP",
    "SSH_*",
    "XDG_*",
    "DBUS_*",
    "XAUTHORITY",
    "WAYLAND_*",
    "LANDBRIDGE_TOPOLOGY",
    "LANDBRIDGE_SETTINGS",
    "LANDBRIDGE_KEY",
    "PMI_*",
    "PMIX_*",
    "OMPI_COMM_*",
    "HYDI_*",
    "HYDRA_*",
    "BASH_FUNC_*",
];

/// The launcher's variables that ranks get on every host.
fn passed_on(variables: impl Iterator<Item = (OsString, OsString)>) -> BTreeMap<String, String> {
    let stays = |name: &str| {
        STAYS_HERE.iter().any(|pattern| match pattern.strip_suffix('*') {
            Some(start) => name.starts_with(start),
            None => name == *pattern,
        })
    };
    // Variables that are not UTF-8 cannot be sent; agents on this machine inherit these variables
    // and pass them on to their ranks.
    variables
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| !stays(name))
        .collect()
}

fn describe(top: &Node) {
    for node in std::iter::once(top).chain(&top.children) {
        let relay = match (&node.relay_unix, node.is_spare) {
            (Some(_), _) => "relay, ",
            (None, true) => "spare, ",
            (None, false) => "",
        };
        let ranks = match node.rank_count {
            0 => "no ranks".to_string(),
            1 => format!("rank {}", node.first_rank),
            count => format!("ranks {} to {}", node.first_rank, node.first_rank + count - 1),
        };
        let (cluster, name) = (&node.cluster_name, &node.name);
        eprintln!("landbridge: cluster {cluster}: node {name}: {relay}{ranks}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_belongs_to_this_login_stays_here() {
        let names = ["HOME", "SSH_AUTH_SOCK", "PATH", "FI_LOG_LEVEL", "PMI_FD", "LANDBRIDGE_PATHS"];
        let variables = names.map(|name| (name.into(), "v".into()));
        let passed: Vec<String> = passed_on(variables.into_iter()).into_keys().collect();
        assert_eq!(passed, ["FI_LOG_LEVEL", "LANDBRIDGE_PATHS", "PATH"]);
    }
}
