"""Fleet command: replays losses and returns of ranks for several policies."""

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipesched.cli.options import INPUT, PICTURES, Output, as_bytes, echo, write
from pipesched.units import quote_time

if TYPE_CHECKING:
    from pipesched.fleet import Capacity, FleetTrace

__all__ = ["fleet"]


@click.command(short_help="Simulate losses and returns of ranks.")
@click.argument("trace", type=INPUT, required=False)
@click.option("--family", help="A generated trace in place of TRACE: single, hosts, decline, spot, waves or flapping.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the generated trace.")
@click.option("--profile", type=INPUT, required=True, help="A saved profile, or a table of layers (.csv).")
@click.option("--rows", type=click.IntRange(min=1), help="Rows of the micro-batch whose costs the table has.")
@click.option("--batch", type=click.IntRange(min=1), required=True, help="Number of rows in a batch of all replicas.")
@click.option(
    "--ranks", type=click.IntRange(min=1), help="Number of ranks.  [default: those of TRACE; 64 with --family]"
)
@click.option(
    "--until",
    type=click.FloatRange(min=0, min_open=True),
    help="The end in seconds.  [default: the last event of TRACE; a day or 8 hours with --family]",
)
@click.option("--memory-limit", callback=as_bytes, help="Memory limit of each rank, such as 72GB.  [default: no limit]")
@click.option("--policy", "policies", multiple=True, help="A policy to replay; can be repeated.  [default: all]")
@click.option("--notice", type=float, help="Seconds until the other ranks notice a loss.  [default: 0.5]")
@click.option("--restart", type=float, help="Seconds to restart from a checkpoint.  [default: 120]")
@click.option("--link", callback=as_bytes, help="Bytes per second between two ranks, such as 25GB.  [default: 10GB]")
@click.option(
    "--effort",
    type=click.IntRange(min=1),
    help="Number of actions that the search for each number of ranks may simulate.  [default: 300,000]",
)
@click.option(
    "-o",
    "--output",
    type=Output(".json", *PICTURES),
    multiple=True,
    help="Write the figures to this .json file, or the picture to this .png, .svg or .pdf file.",
)
def fleet(*, output: tuple[Path, ...], policies: tuple[str, ...], **choices: Any) -> None:
    """Replay the losses and returns of ranks in TRACE, a CSV file with the columns time_s,rank,event (up or down).

    Four policies are replayed on the same plans and costs: elastic (the ranks that are alive plan again and move
    layers), checkpoint-restart, whole-replicas (a replica that has lost a rank drops out), and rerouting (other ranks
    take the micro-batches of lost ranks). Prints for each the throughput; its share of what the ranks that are alive
    could do; repeated work, stalls, restarts and moved bytes. The fastest plans for all numbers of ranks are searched
    first, which takes about a second for each number. No trace needs torch.

    \b
    Examples:
      pipesched fleet trace.csv --profile profile.json --batch 512 --memory-limit 72GB
      pipesched fleet --family spot --seed 1 --profile layers.csv --rows 4 --batch 512 -o fleet.png
    """
    from pipesched.fleet import POLICIES, FleetCosts, replay

    trace = _trace(choices)
    given = {"notice_s": choices["notice"], "restart_s": choices["restart"], "link_bytes_per_s": choices["link"]}
    costs = FleetCosts(**{name: value for name, value in given.items() if value is not None})
    capacity = _capacity(choices, trace.num_ranks, costs)
    report = replay(trace, capacity, policies=policies or tuple(POLICIES), costs=costs)
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console

        Console().print(report)
    else:
        echo(report.text())
    for path in output:
        write(report.save, path)


def _trace(choices: dict[str, Any]) -> "FleetTrace":
    from pipesched.fleet import generate, read_trace

    file, family, ranks = choices["trace"], choices["family"], choices["ranks"]
    if (file is None) == (family is None):
        got = "both" if file else "neither"
        raise click.UsageError(f"fleet needs TRACE, or --family with a name; got {got}; pass one of them")
    if file is not None:
        return read_trace(file, num_ranks=ranks, duration_s=choices["until"])
    return generate(family, num_ranks=ranks or 64, seed=choices["seed"], duration_s=choices["until"])


def _capacity(choices: dict[str, Any], num_ranks: int, costs: Any) -> "Capacity":
    """Search the plans of all numbers of ranks, and show how far the search is if stderr is a terminal."""
    from pipesched.fleet import Capacity
    from pipesched.fleet.capacity import EFFORT
    from pipesched.simulation.profile import Profile

    file: Path = choices["profile"]
    capacity = Capacity(
        Profile.from_table(file, rows=choices["rows"]) if file.suffix == ".csv" else Profile.load(file),
        batch_size=choices["batch"],
        num_ranks=num_ranks,
        memory_limit_bytes=choices["memory_limit"],
        link=costs.link,
        effort=choices["effort"] or EFFORT,
    )
    for count in range(1, num_ranks + 1):
        plan = capacity.best(count)
        if sys.stderr.isatty():
            found = "no plan" if plan is None else quote_time(plan.step_s)
            click.echo(f"\rplans: {count} of {num_ranks} ranks, {found} a step    ", err=True, nl=count == num_ranks)
    return capacity
