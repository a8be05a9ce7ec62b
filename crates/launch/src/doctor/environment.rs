//! Checks for variables of this shell that choose another transport than Landbridge.

use super::Finding;
use crate::cli::Library;
use crate::env;
use crate::mpi::transport_variables;

pub fn check() -> Vec<Finding> {
    let variable = |name: &str| std::env::var_os(name);
    let mut findings: Vec<Finding> = Vec::new();
    for (is, instead) in transport_variables::found_here(variable) {
        findings.push(Finding::notice(
            format!("{is} is set here, and chooses another transport than Landbridge"),
            format!(
                "`landbridge run` gives its ranks {instead} and says so; for an mpirun of your \
                 own, after `landbridge env`, see what sets it (a module, ~/.bashrc)"
            ),
        ));
    }
    for (is, instead) in env::replaced(Library::Openmpi, variable) {
        if is.starts_with("OMPI_") {
            findings.push(Finding::notice(
                format!("{is} is set here, and chooses another transport for Open MPI"),
                format!("`landbridge env --mpi openmpi` sets {instead}"),
            ));
        }
    }
    findings
}
