"""Jobs: what each rank runs, and the environment that tells a rank its number and the address of the store."""

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from pipesched.errors import InputError

__all__ = ["LaunchedJob", "command_of"]


@dataclass(frozen=True)
class LaunchedJob:
    """The ranks of a job that run on this host.

    Attributes:
        command: the program that each rank runs, with its arguments.
        num_ranks: the number of ranks on this host.
        first_rank: the number of the first rank on this host.
        of: the number of ranks on all hosts.

    """

    command: tuple[str, ...]
    num_ranks: int
    first_rank: int
    of: int

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise InputError(
                f"--ranks must be at least 1; got {self.num_ranks}; pass the number of ranks to start on this host"
            )
        if self.first_rank < 0 or self.first_rank + self.num_ranks > self.of:
            last = self.first_rank + self.num_ranks - 1
            raise InputError(
                f"the ranks of this host must be among the 0..{self.of - 1} of the job; got ranks "
                f"{self.first_rank}..{last}; change --first-rank, --ranks or --of"
            )

    @property
    def on_several_hosts(self) -> bool:
        """Whether other hosts have ranks of the job."""
        return self.of > self.num_ranks

    def environment(self, local_rank: int, address: tuple[str, int], given: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables of a rank: those given, and the variables that torch's ``env://`` reads.

        ``TORCHELASTIC_USE_AGENT_STORE`` makes every rank a client of the store at ``address``. Without it, rank 0 would
        host the store, and its death would take the store from the other ranks. As under torchrun, several ranks have
        one OpenMP thread each, unless OMP_NUM_THREADS is set. Python writes each line at once, so that a killed rank
        loses none.
        """
        host, port = address
        defaults = {"PYTHONUNBUFFERED": "1"} | ({"OMP_NUM_THREADS": "1"} if self.num_ranks > 1 else {})
        own = {
            "RANK": str(self.first_rank + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.of),
            "LOCAL_WORLD_SIZE": str(self.num_ranks),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        return defaults | dict(given) | own


def command_of(script: str, arguments: tuple[str, ...], *, is_module: bool) -> tuple[str, ...]:
    """Return the command that runs a script, or a module as with ``python -m``. Raises InputError if it is missing."""
    if is_module:
        top = script.partition(".")[0]
        if importlib.util.find_spec(top) is None and PathFinder.find_spec(top, [os.getcwd()]) is None:
            raise InputError(
                f"-m needs a module that Python can import; there is no module {top!r}; check the name, or run the "
                "command in the folder that contains the module"
            )
        return (sys.executable, "-m", script, *arguments)
    if not Path(script).is_file():
        what = "is a folder" if Path(script).is_dir() else "does not exist"
        raise InputError(
            f"the script must be a Python file; {script!r} {what}; check the path, or pass -m for a module"
        )
    return (sys.executable, script, *arguments)
