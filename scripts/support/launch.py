"""Command line and environment of an MPI program, for each configuration that is compared.

A `LaunchConfig` names an MPI library, a libfabric provider (or another transport), and a launcher.
It turns `(ranks, program)` into a command and the environment to add.
"""

import os
from dataclasses import dataclass, field

from . import lab, paths

# The settings that `landbridge env --mpi mpich` prints.
MPICH_OFI = {
    "MPIR_CVAR_CH4_NETMOD": "ofi",
    "MPIR_CVAR_NOLOCAL": "1",
    "MPIR_CVAR_CH4_OFI_MAX_EAGAIN_RETRY": "2147483393",
}


@dataclass(frozen=True)
class LaunchConfig:
    """A configuration: `mpi` is mpich, ompi or impi; `provider` is a libfabric provider's name.

    `via` is "own" (the library's launcher), "run" (`landbridge run`), "clusters" (`landbridge run
    --clusters 2`) or "lossy" (over two hosts with a bad network between them, see `lab.LOSSY`).
    `settings` are those of Landbridge's provider, `NAME=VALUE`; `extra` is added to the environment
    last.
    """

    mpi: str
    provider: str = "landbridge"
    via: str = "own"
    settings: tuple[str, ...] = ()
    extra: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        words = [self.mpi, self.provider.replace(";", "+"), self.via, *self.settings]
        return "-".join(words).replace("=", "-")

    def command(self, ranks: int, program: list[str]) -> list[str]:
        place = []
        if self.via == "lossy":
            place = lab.run(paths.LANDBRIDGE, lab.LOSSY, f"lossy-{os.getpid()}")
        launcher = self._own_launcher if self._is_own() else self._our_launcher
        return place + launcher(ranks) + program

    def environment(self) -> dict[str, str]:
        env = self._library_environment()
        if self._is_own():
            env |= self._provider_environment()
        if self.via == "lossy":
            env |= lab.agent_environment(paths.LANDBRIDGE)
        return env | self.extra

    def why_not(self) -> str:
        """Why this machine cannot run the configuration; empty if it can."""
        return lab.why_not(paths.LANDBRIDGE, lab.LOSSY) if self.via == "lossy" else ""

    def needs(self) -> list:
        """The files that the configuration needs."""
        ours = [paths.PROVIDER] if self.provider == "landbridge" else []
        launcher = [] if self.via == "own" else [paths.LANDBRIDGE]
        return [paths.venv(self.mpi) / "bin" / "python", *ours, *launcher]

    def _is_own(self) -> bool:
        """Whether the library's own launcher starts the ranks: Open MPI has no other launcher."""
        return self.via == "own" or (self.via == "lossy" and self.mpi == "ompi")

    def _our_launcher(self, ranks: int) -> list[str]:
        places = {"clusters": ["--clusters", "2"], "lossy": ["--ranks-per-node", str(per_host(ranks))]}
        settings = [word for setting in self._all_settings() for word in ("--set", setting)]
        other = [] if self.provider == "landbridge" else ["--provider", self.provider]
        words = [*places.get(self.via, []), *settings, *other]
        return [str(paths.LANDBRIDGE), "run", "-n", str(ranks), *words, "--"]

    def _all_settings(self) -> list[str]:
        apart = [f"rails_exclude={lab.CLEAN_NETWORK}"] if self.via == "lossy" else []
        return [*apart, *self.settings]

    def _own_launcher(self, ranks: int) -> list[str]:
        bin_ = paths.venv(self.mpi) / "bin"
        if self.mpi != "ompi":
            return [str(bin_ / "mpiexec"), "-n", str(ranks)]
        options = {"pml": "cm", "mtl": "ofi", "opal_common_ofi_provider_include": self.provider}
        mca = [word for key, value in options.items() for word in ("--mca", key, value)]
        root = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        if self.via == "lossy":
            hosts = ",".join(f"{host}:{per_host(ranks)}" for host in lab.LOSSY_HOSTS)
            root += ["--host", hosts, *lab.daemons(lab.CLEAN_DEVICE)]
        return [str(bin_ / "mpirun"), "-n", str(ranks), *root, *mca]

    def _library_environment(self) -> dict[str, str]:
        if self.mpi == "mpich":
            return dict(MPICH_OFI)
        if self.mpi == "impi":
            root = str(paths.venv("impi"))
            return {"I_MPI_ROOT": root, "I_MPI_FABRICS": "ofi", "I_MPI_HYDRA_BOOTSTRAP": "fork"}
        return {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}

    def _provider_environment(self) -> dict[str, str]:
        env = {"FI_PROVIDER": self.provider}
        if self.provider == "landbridge":
            env["FI_PROVIDER_PATH"] = str(paths.RELEASE)
            pairs = (setting.split("=", 1) for setting in self._all_settings())
            env |= {f"LANDBRIDGE_{name.upper()}": value for name, value in pairs}
        return env


def per_host(ranks: int) -> int:
    """The number of ranks on each of the two hosts of a lab."""
    return (ranks + 1) // 2
