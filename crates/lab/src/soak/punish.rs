//! The subcommand `punish`: programs under `landbridge run --recover` while their ranks are killed
//! at random times.
//!
//! Like `soak`, the subcommand starts a lab whose command is this program with `--inside`. The lab
//! contains all processes of the run and leaves nothing behind: one site, on whose first host all
//! ranks run.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use landbridge_proto::setting::RECOVER_LOG;

use super::command::{self, EXIT_USAGE};
use super::fault::{self, FaultLocations};
use super::network_faults::NetworkFaults;
use super::program::{FaultMode, Placement, Program, Tools};
use super::rank_killer::{KillSchedule, KillTarget, RankKiller};
use super::run::{CombinedInjector, Soak, SoakOptions};
use super::schedule::FaultSchedule;
use super::tally::Tally;
use crate::net::file;
use crate::net::namespace::LAB_DIR;

/// Lab description for a run without `--lab`.
const DEFAULT_LAB: &str = "name = \"punish\"\n\n[[site]]\nname = \"here\"\nhosts = 1\n";

/// Arguments of `landbridge lab punish`.
#[derive(Args)]
pub struct PunishArguments {
    /// Minutes during which ranks are killed; the last program then runs to its end
    #[arg(long, default_value_t = 3.0)]
    minutes: f64,
    /// Mean interval between two kills in seconds; intervals are exponentially distributed
    #[arg(long, default_value_t = 3.0, value_name = "SECONDS")]
    mean: f64,
    /// Seed of the random schedule; default: a new seed in each run, which is printed
    #[arg(long)]
    seed: Option<u64>,
    /// Programs to run: imb, heat, sums, udp, ring, wildcards, files; default: all, `udp` only with
    /// ranks on several hosts (--lab, --hosts) whose messages are logged by their senders
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    program: Vec<Program>,
    /// Number of ranks of each program
    #[arg(long, short = 'n', default_value_t = 4)]
    ranks: usize,
    /// Divide the machine into N clusters joined by relays
    #[arg(long, value_name = "N")]
    clusters: Option<usize>,
    /// Interval in seconds between two checkpoints of each rank, from which a killed rank is
    /// restored (needs CRIU); default: no checkpoints
    #[arg(long, value_name = "SECONDS")]
    checkpoint: Option<f64>,
    /// Path of CRIU, for --checkpoint; default: the path that `landbridge run` finds
    #[arg(long, value_name = "FILE", requires = "checkpoint")]
    criu: Option<PathBuf>,
    /// Kinds of network faults between clusters: loss1, loss5, corrupt, reorder, duplicate,
    /// wan-cut, relay-stop, or `all`. Ranks then run on the gateways of the lab; default lab: that
    /// of labs/two-rails.toml
    #[arg(long, value_delimiter = ',', value_name = "KIND,…", conflicts_with = "clusters")]
    faults: Vec<String>,
    /// Run ranks on the hosts of the lab instead of its gateways, so that --faults strikes rails
    /// and interfaces of a cluster, too (also `interface`, `slow`); not with recover_log=relay
    #[arg(long, requires = "faults")]
    hosts: bool,
    /// Lab file (TOML) over whose hosts programs run; default: a lab of one host
    #[arg(long, value_name = "FILE", conflicts_with = "clusters")]
    lab: Option<PathBuf>,
    /// Limit in seconds of one run of a program
    #[arg(long, default_value_t = 150.0, value_name = "SECONDS")]
    limit: f64,
    /// Directory with the virtual environments mpich and impi; default: build/venv in the current
    /// directory, or the one of the build directory of this program
    #[arg(long, value_name = "DIR")]
    venvs: Option<PathBuf>,
    /// Print the schedule of kills and exit
    #[arg(long)]
    schedule: bool,
    /// Run inside the lab that this subcommand has started
    #[arg(long, hide = true)]
    inside: bool,
}

impl PunishArguments {
    /// Runs the subcommand. Returns 0 if every program ended right, 1 if a program did not, 2 if
    /// the arguments are wrong, 130 if a signal ended the run.
    pub fn execute(&self) -> anyhow::Result<u8> {
        if let Err(error) = self.check() {
            eprintln!("landbridge lab punish: {error:#}");
            return Ok(EXIT_USAGE);
        }
        let seed = self.seed.unwrap_or_else(command::new_seed);
        if self.schedule {
            self.print(seed);
            return Ok(0);
        }
        match self.inside {
            true => self.punish(seed),
            false => {
                let lab = if self.faults.is_empty() { DEFAULT_LAB } else { command::DEFAULT_LAB };
                command::enter("punish", self.lab.as_deref(), lab, self.arguments(seed))
            }
        }
    }

    /// Schedule of network faults; `None`: no faults.
    fn schedule(&self, seed: u64) -> anyhow::Result<Option<FaultSchedule>> {
        if self.faults.is_empty() {
            return Ok(None);
        }
        let plan = match &self.lab {
            Some(path) => file::load(path)?,
            None => file::parse(command::DEFAULT_LAB, "punish")
                .map_err(|error| anyhow::anyhow!("{}", error.message))?,
        };
        let mut places = FaultLocations::of(&plan);
        if !self.hosts {
            // All ranks run on gateways, so no traffic uses the rails of a site.
            (places.rails, places.interfaces) = (Vec::new(), Vec::new());
        }
        let named = self.faults.iter().filter(|name| *name != "all");
        let named: Result<Vec<fault::FaultKind>, String> = named.map(|name| name.parse()).collect();
        let mut kinds = named.map_err(anyhow::Error::msg)?;
        if kinds.is_empty() {
            kinds = fault::FaultKind::ALL.to_vec();
        } else if let Some(kind) = kinds.iter().find(|kind| kind.specs(&places).is_empty()) {
            let place = if self.hosts { "in" } else { "between the clusters of" };
            bail!("`{}` can strike nowhere {place} this lab", kind.name());
        }
        Ok(Some(FaultSchedule::new(seed, &kinds, &places)))
    }

    fn check(&self) -> anyhow::Result<()> {
        if let Some(path) = &self.lab {
            file::load(path)?;
        }
        let times = [("minutes", self.minutes), ("limit", self.limit), ("mean", self.mean)];
        for (name, value) in times.into_iter().chain(self.checkpoint.map(|it| ("checkpoint", it))) {
            command::check_time(name, value)?;
        }
        if self.checkpoint.is_some_and(|every| every < 0.1) {
            bail!("--checkpoint {}: it takes longer to take one", self.checkpoint.unwrap_or(0.0));
        }
        if self.mean < 0.05 {
            bail!("--mean {}: no rank comes back so soon", self.mean);
        }
        if self.hosts && !senders_log() {
            // A corrupt byte between a rank and its relay can make the log useless.
            bail!("--hosts does not go with recover_log=relay: the rails are beyond the relays");
        }
        if let (true, Some(why)) = (self.program.contains(&Program::Udp), self.why_no_udp()) {
            bail!("udp: {why}");
        }
        self.schedule(0)?;
        if self.schedule { Ok(()) } else { self.tools()?.check(&self.programs()) }
    }

    fn time(&self) -> Duration {
        Duration::from_secs_f64(self.minutes * 60.0)
    }

    fn programs(&self) -> Vec<Program> {
        let mut programs = command::chosen(&self.program, FaultMode::Punish);
        programs.retain(|program| *program != Program::Udp || self.why_no_udp().is_none());
        programs
    }

    fn placement(&self) -> Placement {
        match (self.faults.is_empty(), &self.lab) {
            (false, _) if self.hosts => Placement::Hosts,
            (false, _) => Placement::Gateways,
            (true, Some(_)) => Placement::Hosts,
            (true, None) => Placement::One,
        }
    }

    /// Why the setting `udp=on` has no effect in this run; `None`: it has one.
    fn why_no_udp(&self) -> Option<&'static str> {
        match (self.placement(), senders_log()) {
            (Placement::Hosts, true) => None,
            (Placement::Hosts, false) => {
                Some("with recover_log=relay all messages go through relays, by streams")
            }
            _ => Some("only hosts of one cluster exchange messages over UDP: add --lab or --hosts"),
        }
    }

    fn kills(&self, seed: u64) -> KillSchedule {
        KillSchedule::new(seed, Duration::from_secs_f64(self.mean))
    }

    fn tools(&self) -> anyhow::Result<Tools> {
        let (landbridge, venvs) = command::programs_and_venvs(self.venvs.as_deref())?;
        // A large number of restarts is allowed, because the kills are not the ranks' fault.
        let mut words = ["--recover", "--max-restarts=1000000"].map(String::from).to_vec();
        words.extend(self.clusters.map(|clusters| format!("--clusters={clusters}")));
        words.extend(self.hosts.then(|| "--set=recover_log=sender".to_owned()));
        // Whole milliseconds: a time option has no decimal point.
        let millis = self.checkpoint.map(|every| (every * 1e3) as u64);
        words.extend(millis.map(|millis| format!("--checkpoint={millis}ms")));
        words.extend(self.criu.iter().map(|file| format!("--set=criu={}", file.display())));
        Ok(Tools {
            landbridge,
            venvs,
            dir: Path::new(LAB_DIR).join("punish"),
            ranks: self.ranks,
            mode: FaultMode::Punish,
            run_options: words,
            placement: self.placement(),
        })
    }

    fn print(&self, seed: u64) {
        println!("seed {seed}");
        for kill in self.kills(seed).take_while(|kill| kill.at < self.time()) {
            println!("{:8.1} s  {}", kill.at.as_secs_f64(), kill.target.kind().1);
        }
    }

    /// The command-line arguments that repeat this run with this seed.
    fn arguments(&self, seed: u64) -> Vec<OsString> {
        let mut words: Vec<OsString> = Vec::new();
        let mut add = |name: &str, value: OsString| words.extend([name.into(), value]);
        add("--seed", seed.to_string().into());
        add("--minutes", self.minutes.to_string().into());
        add("--mean", self.mean.to_string().into());
        add("--ranks", self.ranks.to_string().into());
        add("--limit", self.limit.to_string().into());
        if let Some(clusters) = self.clusters {
            add("--clusters", clusters.to_string().into());
        }
        if !self.program.is_empty() {
            let names: Vec<&str> = self.program.iter().map(|program| program.name()).collect();
            add("--program", names.join(",").into());
        }
        if !self.faults.is_empty() {
            add("--faults", self.faults.join(",").into());
        }
        if let Some(every) = self.checkpoint {
            add("--checkpoint", every.to_string().into());
        }
        for (name, path) in [("--criu", &self.criu), ("--lab", &self.lab), ("--venvs", &self.venvs)]
        {
            if let Some(path) = path {
                add(name, path.into());
            }
        }
        words.extend(self.hosts.then(|| "--hosts".into()));
        words
    }

    fn punish(&self, seed: u64) -> anyhow::Result<u8> {
        let replay = command::rerun_command("punish", &self.arguments(seed));
        println!("punish: {replay}");
        let tools = self.tools()?;
        let killer = RankKiller::new(tools.landbridge.clone(), self.kills(seed), self.time());
        let options = SoakOptions {
            tools,
            programs: self.programs(),
            time: self.time(),
            limit: Duration::from_secs_f64(self.limit),
            rerun_command: replay,
        };
        let mut kinds = KillTarget::ALL.map(KillTarget::kind).to_vec();
        let (tally, is_interrupted) = match self.schedule(seed)? {
            None => Soak::run(&options, killer, Tally::new(kinds))?,
            Some(schedule) => {
                kinds.extend(fault::FaultKind::ALL.map(|kind| (kind.name(), kind.what())));
                let network_faults = NetworkFaults::new(schedule, self.time());
                Soak::run(&options, CombinedInjector(network_faults, killer), Tally::new(kinds))?
            }
        };
        Ok(command::conclude("punish", seed, &tally, is_interrupted))
    }
}

/// Whether the senders log messages: true unless the user's settings choose the relays.
fn senders_log() -> bool {
    !std::env::var(RECOVER_LOG.variable()).is_ok_and(|said| said.trim() == "relay")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct PunishCli {
        #[command(flatten)]
        punish: PunishArguments,
    }

    #[test]
    fn the_arguments_of_a_rerun_say_the_same() {
        let line = "x --minutes 0.5 --mean 2.5 --seed 9 --program ring,heat -n 3 --clusters 2 \
                    --checkpoint 1.5 --criu /c/criu";
        let punish = PunishCli::parse_from(line.split_whitespace()).punish;
        let words = punish.arguments(9);
        let again = PunishCli::parse_from([OsString::from("x")].into_iter().chain(words.clone()));
        assert_eq!(again.punish.arguments(9), words);
        assert_eq!((again.punish.seed, again.punish.ranks), (Some(9), 3));
        assert_eq!((again.punish.clusters, again.punish.checkpoint), (Some(2), Some(1.5)));
        let line = "x --faults wan-cut,loss1";
        let punish = PunishCli::parse_from(line.split(' ')).punish;
        let words = punish.arguments(9);
        let again = PunishCli::parse_from([OsString::from("x")].into_iter().chain(words)).punish;
        assert_eq!(again.faults, ["wan-cut", "loss1"]);
        assert!(again.schedule(9).unwrap().is_some());
        let rail = PunishCli::parse_from(["x", "--faults", "slow"]).punish;
        assert!(rail.schedule(9).is_err_and(|error| error.to_string().contains("nowhere")));
        let hosts = PunishCli::parse_from(["x", "--faults", "slow", "--hosts"]).punish;
        let words = hosts.arguments(9);
        let again = PunishCli::parse_from([OsString::from("x")].into_iter().chain(words)).punish;
        assert!(again.hosts && again.schedule(9).unwrap().is_some());
        assert!(PunishCli::try_parse_from(["x", "--hosts"]).is_err());
    }

    #[test]
    fn udp_needs_ranks_on_hosts() {
        let punish = |line: &str| {
            let words = "x --schedule ".to_owned() + line;
            PunishCli::parse_from(words.split_whitespace()).punish
        };
        for line in ["", "--clusters 2", "--faults all"] {
            let udp = punish(&format!("--program udp {line}"));
            assert!(udp.check().unwrap_err().to_string().contains("over UDP"));
            assert!(punish(line).check().is_ok());
            assert!(!punish(line).programs().contains(&Program::Udp));
        }
        for line in ["--faults all --hosts", "--lab a.toml"] {
            let udp = punish(&format!("--program udp {line}"));
            assert_eq!((udp.why_no_udp(), udp.programs()), (None, vec![Program::Udp]));
            assert!(punish(line).programs().contains(&Program::Udp));
        }
        assert!(punish("--program imb").check().is_ok(), "what it reads of clocks is recorded");
        assert!(file::parse(DEFAULT_LAB, "punish").is_ok());
    }
}
