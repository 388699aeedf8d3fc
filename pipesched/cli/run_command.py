"""Run command: starts the ranks of a job on this host, and goes on with the others if one is lost."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from pipesched.errors import InputError
from pipesched.launcher.job_store import JobStore
from pipesched.launcher.launched_job import LaunchedJob, command_of
from pipesched.launcher.launcher import Launcher
from pipesched.launcher.output import Screen
from pipesched.launcher.rank_process import RankProcess

__all__ = ["run"]


class _RefusedError(click.ClickException):
    """A job that cannot be started."""

    exit_code = 2


@click.command(
    short_help="Start the ranks of a job; survivors go on if one is lost.",
    context_settings={"allow_interspersed_args": False},  # options after the script are the script's
)
@click.option("--ranks", type=int, required=True, help="Number of ranks to start on this host.")
@click.option("-m", "--module", "is_module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.option(
    "--max-losses", type=click.IntRange(min=0), help="Stop the job if more ranks are lost.  [default: no limit]"
)
@click.option(
    "--stop-on-failure", is_flag=True, help="Stop the job if a rank is lost, as torchrun does: --max-losses 0."
)
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Seconds from SIGTERM to SIGKILL when the job is stopped.",
)
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Append the output of each rank to a file in this folder, rank-0.log and so on.  [default: to stdout and "
    "stderr, with the rank before each line]",
)
@click.option("--address", help="HOST:PORT of the store, on the host of rank 0.  [default: 127.0.0.1 and a free port]")
@click.option("--first-rank", type=int, default=0, show_default=True, help="Number of the first rank on this host.")
@click.option("--of", type=int, help="Number of ranks on all hosts.  [default: --ranks]")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(script: str, arguments: tuple[str, ...], *, is_module: bool, **options: Any) -> None:
    """Start SCRIPT with its ARGUMENTS in one process for each rank, and go on with the others if a rank is lost.

    Each process gets the environment variables that torch.distributed.init_process_group() reads. The launcher hosts
    torch's store, so the death of a rank, also of rank 0, does not take it away. As under torchrun, OMP_NUM_THREADS is
    1 if there are several ranks and it is not set.

    A rank is lost if it exits with another code than 0, or is killed. The other ranks are not stopped, unless more than
    --max-losses ranks are lost. The exit code is 0 if a rank of this host ended with 0 and the job was not stopped, or
    if all ranks ended with 0; else 1. It is 2 if the job cannot be started.

    SIGTERM, SIGINT and SIGHUP stop the job: each rank gets SIGTERM, and SIGKILL after --grace seconds or at a second
    signal. If the launcher is killed, Linux kills its ranks.

    With ranks on several hosts, start the command once on each host, with the same --of and --address.

    \b
    Examples:
      pipesched run --ranks 4 train.py --epochs 3
      pipesched run --ranks 4 --max-losses 1 --log-dir logs -m package.train
      pipesched run --ranks 4 --of 8 --address host-a:29500 train.py                   (on host-a)
      pipesched run --ranks 4 --of 8 --address host-a:29500 --first-rank 4 train.py    (on host-b)
    """
    try:
        code = _launcher(command_of(script, arguments, is_module=is_module), **options).run()
    except InputError as error:
        raise _RefusedError(str(error)) from error
    raise click.exceptions.Exit(code)


def _launcher(
    command: tuple[str, ...],
    *,
    ranks: int,
    first_rank: int,
    of: int | None,
    address: str | None,
    log_dir: Path | None,
    **rules: Any,
) -> Launcher:
    job = LaunchedJob(command, ranks, first_rank, ranks if of is None else of)
    host, port = _host_and_port(address, job)
    store = None
    if first_rank == 0:
        store = JobStore(host, port, num_ranks=job.of, all_addresses=job.on_several_hosts)
        host, port = store.address
    max_losses = _max_losses(**{name: rules.pop(name) for name in ("max_losses", "stop_on_failure")})
    if log_dir:
        _make(log_dir)
    screen = Screen(sys.stdout.fileno(), sys.stderr.fileno())
    processes = [
        RankProcess(
            first_rank + at,
            command,
            job.environment(at, (host, port), os.environ),
            screen,
            log_dir / f"rank-{first_rank + at}.log" if log_dir else None,
        )
        for at in range(ranks)
    ]
    return Launcher(
        processes,
        screen,
        store,
        max_losses=max_losses,
        other_hosts=job.on_several_hosts,
        **rules,
    )


def _max_losses(*, max_losses: int | None, stop_on_failure: bool) -> int | None:
    if stop_on_failure and max_losses:
        raise InputError(
            f"--stop-on-failure allows no loss; got it with --max-losses {max_losses}; leave out one of the options"
        )
    return 0 if stop_on_failure else max_losses


def _host_and_port(address: str | None, job: LaunchedJob) -> tuple[str, int]:
    if address is None:
        if job.on_several_hosts:
            raise InputError(
                f"ranks on several hosts need the address of the store; got --of {job.of} with {job.num_ranks} ranks "
                "here and no --address; pass --address HOST:PORT with the host of rank 0, such as host-a:29500"
            )
        return "127.0.0.1", 0
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InputError(f"--address must be HOST:PORT; got {address!r}; pass, for example, host-a:29500")
    return host.strip("[]"), int(port)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--log-dir must be a folder; cannot make {folder}: {error.strerror}; change it") from error
