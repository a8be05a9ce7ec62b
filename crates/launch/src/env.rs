//! `landbridge env`: prints the environment with which an MPI library's own launcher uses the
//! provider inside one cluster. The output is a shell script: `export` lines, and comments on their
//! use. The script contains the job key only if standard output is no terminal, so that a terminal
//! never shows the key.

use std::ffi::OsString;
use std::io::IsTerminal;

use anyhow::Result;
use landbridge_proto::setting::{self, Reader};

use crate::cli::{EnvArguments, Library};
use crate::mpi::{MPICH_RETRIES, PROVIDER};
use crate::settings::{InForce, SettingSource, Settings};
use crate::sibling;
use crate::spawn::ssh::quote;
use crate::sys;

/// Prints the script.
pub fn run(arguments: &EnvArguments) -> Result<()> {
    let directory = sibling::provider_directory()?.display().to_string();
    let own = Settings::find(&arguments.settings, &[], None)?;
    let fresh = (sys::random_hex(32)?, sys::random_hex(64)?);
    let secrets = (!std::io::stdout().is_terminal()).then_some((fresh.0.as_str(), &*fresh.1));
    for (is, instead) in replaced(arguments.mpi, |name| std::env::var_os(name)) {
        eprintln!(
            "landbridge env: {is} is set here and chooses another transport: it becomes {instead}"
        );
    }
    print!("{}", script(arguments.mpi, &directory, arguments.ranks, secrets));
    if own.text(&setting::LOCAL) == "library" {
        print!("{}", local_left_to(arguments.mpi));
    }
    print!("{}", said(&own));
    Ok(())
}

/// The text of the script. `secrets` holds job id and key; without `secrets` the script says how to
/// get them.
fn script(
    library: Library,
    provider_directory: &str,
    ranks: Option<u32>,
    secrets: Option<(&str, &str)>,
) -> String {
    let mut text = String::new();
    for line in usage(library) {
        text.push_str(&format!("# {line}\n"));
    }
    let mut export = |name: &str, value: &str| {
        text.push_str(&format!("export {name}={}\n", quote(value)));
    };
    if let Some((job, key)) = secrets {
        export("LANDBRIDGE_JOB", job);
        export("LANDBRIDGE_KEY", key);
    }
    if let Some(ranks) = ranks {
        export("LANDBRIDGE_SIZE", &ranks.to_string());
    }
    export("FI_PROVIDER_PATH", provider_directory);
    export("FI_PROVIDER", PROVIDER);
    settings(library).iter().for_each(|(name, value)| export(name, value));
    for name in taken_out(library) {
        text.push_str(&format!("unset {name}\n"));
    }
    // The script keeps the log level that the user has chosen.
    text.push_str("export LANDBRIDGE_LOG=\"${LANDBRIDGE_LOG-warn}\"\n");
    if secrets.is_none() {
        text.push_str(
            "# Job id and key are not shown on a terminal: use eval \"$(…)\" as above.\n",
        );
    }
    text
}

/// Export lines for settings from the settings file and from flags, because the provider reads only
/// variables. Settings from the shell's own variables need no line.
fn said(own: &Settings) -> String {
    let is_new =
        |it: &&InForce| matches!(it.source, SettingSource::File { .. } | SettingSource::Flag(_));
    let mut text = String::new();
    for it in own.rows.iter().filter(is_new).filter(|it| it.row.is_for(Reader::Process)) {
        text.push_str(&format!("export {}={}\n", it.row.variable(), quote(&it.text)));
    }
    if !text.is_empty() {
        text.insert_str(
            0,
            "# Settings; `mpirun` to other hosts needs an -x for each of these too.\n",
        );
    }
    text
}

/// Variables that each library needs in addition to the common settings.
fn settings(library: Library) -> &'static [(&'static str, &'static str)] {
    match library {
        Library::Mpich => {
            &[("MPIR_CVAR_CH4_NETMOD", "ofi"), ("MPIR_CVAR_NOLOCAL", "1"), MPICH_RETRIES]
        }
        Library::Impi => &[("I_MPI_FABRICS", "ofi"), ("I_MPI_OFI_PROVIDER", PROVIDER)],
        // One-sided communication of Open MPI 5 uses a btl: without `ofi` in the list it would
        // bypass the provider. Open MPI 4 uses the pml for one-sided communication and needs no
        // btl.
        Library::Openmpi => &[
            ("OMPI_MCA_pml", "cm"),
            ("OMPI_MCA_mtl", "ofi"),
            ("OMPI_MCA_opal_common_ofi_provider_include", PROVIDER),
            ("OMPI_MCA_btl", "self,ofi"),
            // The ucx component would look for its own hardware, fail, and print an error for every
            // window.
            ("OMPI_MCA_osc", "^ucx"),
            // hcoll and ucc would run collective operations over transports of their own.
            ("OMPI_MCA_coll_hcoll_enable", "0"),
            ("OMPI_MCA_coll_ucc_enable", "0"),
        ],
    }
}

/// Lines for `local=library`, where the library itself carries messages inside a node. This command
/// does not know the number of ranks and cores, so `auto` counts as `own`.
fn local_left_to(library: Library) -> &'static str {
    match library {
        Library::Mpich => "export MPIR_CVAR_NOLOCAL=0\n",
        Library::Impi => "export I_MPI_FABRICS=shm:ofi\n",
        Library::Openmpi => {
            "# local=library is not heeded: Open MPI sends through one library or the other.\n"
        }
    }
}

/// Variables that would choose another provider despite the settings, and that the script unsets.
fn taken_out(library: Library) -> &'static [&'static str] {
    match library {
        Library::Mpich | Library::Impi => &["MPIR_CVAR_OFI_USE_PROVIDER"],
        Library::Openmpi => &[
            "OMPI_MCA_opal_common_ofi_provider_exclude",
            "OMPI_MCA_mtl_ofi_provider_include",
            "OMPI_MCA_mtl_ofi_provider_exclude",
            "OMPI_MCA_btl_ofi_provider_include",
            "OMPI_MCA_btl_ofi_provider_exclude",
        ],
    }
}

/// Variables of the shell that the script replaces because they choose another transport: each with
/// its present and its new value.
pub fn replaced(
    library: Library,
    variable: impl Fn(&str) -> Option<OsString>,
) -> Vec<(String, String)> {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty());
    let assignment = |name: &str, value: OsString| format!("{name}={}", value.display());
    let changed = [("FI_PROVIDER", PROVIDER)].into_iter().chain(settings(library).iter().copied());
    let changed = changed.filter_map(|(name, needed)| {
        let value = set(name).filter(|value| value.as_os_str() != needed)?;
        Some((assignment(name, value), format!("{name}={needed}")))
    });
    let gone = taken_out(library)
        .iter()
        .filter_map(|name| Some((assignment(name, set(name)?), format!("no {name}"))));
    changed.chain(gone).collect()
}

fn usage(library: Library) -> Vec<&'static str> {
    let mut lines = Vec::new();
    match library {
        Library::Mpich => {
            lines.push("MPICH: mpiexec hands these on to every host.");
            lines.push("  eval \"$(landbridge env --mpi mpich)\"; mpiexec -n 4 ./a.out");
        }
        Library::Impi => {
            lines.push("Intel MPI: mpirun hands these on to every host.");
            lines.push("  eval \"$(landbridge env --mpi impi)\"; mpirun -n 4 ./a.out");
        }
        Library::Openmpi => {
            lines.push("Open MPI on one host:");
            lines.push("  eval \"$(landbridge env --mpi openmpi)\"; mpirun -n 4 ./a.out");
            lines.push("mpirun wants --oversubscribe for more ranks than cores, and");
            lines.push("--allow-run-as-root as root.");
            lines.push("On several hosts, hand on what does not begin with OMPI_:");
            lines.push("  mpirun -x FI_PROVIDER -x FI_PROVIDER_PATH -x LANDBRIDGE_JOB \\");
            lines.push("         -x LANDBRIDGE_KEY -x LANDBRIDGE_LOG --host a,b -n 4 ./a.out");
        }
    }
    lines.push(
        "mpiexec, mpirun and mpicc must be the library's own: its bin directory comes first in",
    );
    lines.push("PATH (that of a virtual environment once it is activated: . DIR/bin/activate).");
    lines.push("srun passes on the environment by itself. The number of processes comes from srun");
    lines.push("(SLURM_STEP_NUM_TASKS) too; `landbridge env -n N` overrides it.");
    lines.push("Job id and key keep out who does not know them. They serve one job after another;");
    lines.push("for jobs at the same time, make new ones each. Keep the key secret.");
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_the_settings_back() {
        for library in [Library::Mpich, Library::Openmpi, Library::Impi] {
            let script = script(library, "/opt/land bridge", Some(4), Some(("aa", "bb")));
            let script = format!("{script}env");
            let output = std::process::Command::new("/bin/sh").args(["-c", &script]).output();
            let output = String::from_utf8(output.unwrap().stdout).unwrap();
            for (name, value) in settings(library) {
                assert!(output.contains(&format!("\n{name}={value}\n")), "{name} in {output}");
            }
            for line in
                ["FI_PROVIDER_PATH=/opt/land bridge", "LANDBRIDGE_KEY=bb", "LANDBRIDGE_SIZE=4"]
            {
                assert!(output.contains(&format!("{line}\n")), "{line} in {output}");
            }
        }
    }

    #[test]
    fn variables_that_choose_another_transport_are_replaced_and_reported() {
        let set = [
            ("OMPI_MCA_pml", "ucx"),
            ("OMPI_MCA_mtl", "ofi"),
            ("OMPI_MCA_mtl_ofi_provider_include", "psm3"),
            ("FI_PROVIDER", "tcp"),
        ];
        let variable = |name: &str| {
            let found = set.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| OsString::from(value))
        };
        let rows = replaced(Library::Openmpi, variable);
        let expected = [
            ("FI_PROVIDER=tcp", "FI_PROVIDER=landbridge"),
            ("OMPI_MCA_pml=ucx", "OMPI_MCA_pml=cm"),
            ("OMPI_MCA_mtl_ofi_provider_include=psm3", "no OMPI_MCA_mtl_ofi_provider_include"),
        ];
        assert_eq!(rows, expected.map(|(is, instead)| (is.to_string(), instead.to_string())));
        let script = script(Library::Openmpi, "/opt", None, None) + "env";
        let mut shell = std::process::Command::new("/bin/sh");
        let output = shell.args(["-c", &script]).envs(set).output().unwrap();
        let output = String::from_utf8(output.stdout).unwrap();
        assert!(output.contains("\nOMPI_MCA_pml=cm\n"), "{output}");
        assert!(!output.contains("psm3") && !output.contains("FI_PROVIDER=tcp"), "{output}");
    }

    #[test]
    fn what_open_mpi_refuses_by_default_is_reported() {
        let script = script(Library::Openmpi, "/opt", None, None);
        for piece in ["--oversubscribe", "--allow-run-as-root", "first in\n# PATH"] {
            assert!(script.contains(piece), "{piece} in {script}");
        }
    }

    #[test]
    fn a_terminal_shows_no_key() {
        let script = script(Library::Mpich, "/opt", None, None);
        assert!(!script.contains("LANDBRIDGE_KEY") && !script.contains("LANDBRIDGE_SIZE"));
        assert!(script.contains("export FI_PROVIDER=") && script.contains("use eval"), "{script}");
    }
}
