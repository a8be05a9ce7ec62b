"""The command line and environment that run an MPI program in each way that is compared.

A `Way` is which MPI library, which libfabric provider (or other transport), and which launcher. It
turns `(ranks, program)` into a command and the environment to add.
"""

from dataclasses import dataclass, field

from . import paths

MPICH_OFI = {"MPIR_CVAR_CH4_NETMOD": "ofi", "MPIR_CVAR_NOLOCAL": "1"}


@dataclass(frozen=True)
class Way:
    """One way to run: `mpi` is mpich, ompi or impi; `provider` is a libfabric provider's name.

    `via` is "own" (the library's launcher), "run" (`landbridge run`) or "clusters" (`landbridge run
    --clusters 2`). `extra` is added to the environment last.
    """

    mpi: str
    provider: str = "landbridge"
    via: str = "own"
    extra: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        return f"{self.mpi}-{self.provider.replace(';', '+')}-{self.via}"

    def command(self, ranks: int, program: list[str]) -> list[str]:
        if self.via == "own":
            return self._own_launcher(ranks) + program
        clusters = ["--clusters", "2"] if self.via == "clusters" else []
        return [str(paths.LANDBRIDGE), "run", "-n", str(ranks), *clusters, "--", *program]

    def environment(self) -> dict[str, str]:
        env = self._library_environment()
        if self.via == "own":
            env |= self._provider_environment()
        return env | self.extra

    def needs(self) -> list:
        """The files without which this way cannot run."""
        ours = [paths.PROVIDER] if self.provider == "landbridge" else []
        launcher = [] if self.via == "own" else [paths.LANDBRIDGE]
        return [paths.venv(self.mpi) / "bin" / "python", *ours, *launcher]

    def _own_launcher(self, ranks: int) -> list[str]:
        bin_ = paths.venv(self.mpi) / "bin"
        if self.mpi != "ompi":
            return [str(bin_ / "mpiexec"), "-n", str(ranks)]
        options = {"pml": "cm", "mtl": "ofi", "opal_common_ofi_provider_include": self.provider}
        mca = [word for key, value in options.items() for word in ("--mca", key, value)]
        root = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
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
        return env
