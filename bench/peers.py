"""The configurations that are compared. All use the same MPICH 5.0.2 and the same IMB binary.

A `Peer` is a name and how to launch. `NODE` are the peers between two processes on a node, `TCP`
the peers over TCP sockets, `CROWD` those for more ranks than cores. `RECOVER` is Landbridge through
a relay that keeps a message log of all frames.
"""

import contextlib
from dataclasses import dataclass

from support import paths

NOLOCAL = {"MPIR_CVAR_NOLOCAL": "1"}
OFI = {"MPIR_CVAR_CH4_NETMOD": "ofi"} | NOLOCAL
UCX = {"MPIR_CVAR_CH4_NETMOD": "ucx"} | NOLOCAL


@dataclass(frozen=True)
class Peer:
    """One way to carry MPI messages: an environment for MPICH's mpiexec, or `landbridge run`."""

    name: str
    env: tuple[tuple[str, str], ...]
    ours: bool = False
    is_yardstick: bool = False  # shown for comparison, without a target
    run_options: tuple[str, ...] | None = None  # of `landbridge run`; None: MPICH's mpiexec

    def command(self, ranks: int, program: list[str]) -> list[str]:
        if self.run_options is None:
            return [str(paths.venv("mpich") / "bin" / "mpiexec"), "-n", str(ranks), *program]
        return [str(paths.LANDBRIDGE), "run", "-n", str(ranks), *self.run_options, "--", *program]

    def place(self):
        """What must exist while the peer is measured: nothing, for most peers."""
        return contextlib.nullcontext()

    def environment(self) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": str(paths.venv("mpich") / "lib")} | dict(self.env)


def peer(name: str, env: dict[str, str]) -> Peer:
    return Peer(name, tuple(env.items()))


def ofi(provider: str) -> Peer:
    return peer(f"libfabric {provider}", OFI | {"FI_PROVIDER": provider})


def ucx(name: str, transports: str) -> Peer:
    return peer(f"UCX {name}", UCX | {"UCX_TLS": transports})


def landbridge(name: str, allowed: str, *options: str) -> Peer:
    env = {"LANDBRIDGE_PATHS": allowed}
    return Peer(f"landbridge {name}", tuple(env.items()), True, run_options=options)


NODE = [
    landbridge("shm", "shm"),
    ofi("shm"),
    ucx("shm", "posix,sysv,cma,self"),
    peer("MPICH shared memory", {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}),
]
RECOVER = Peer("landbridge --recover", (), True, run_options=("--recover",))
TCP = [
    landbridge("tcp", "tcp"),
    ofi("tcp"),
    ofi("tcp;ofi_rxm"),
    ucx("tcp", "tcp,self"),
]
CROWD = [
    landbridge("shm", "shm"),
    ofi("shm"),
    ofi("tcp"),
    ucx("shm", "posix,sysv,cma,self"),
    peer("MPICH shared memory", {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}),
]
