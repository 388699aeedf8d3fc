"""Replicas: the options of ``pipesched show`` for data parallelism, and the lines that it prints about the replicas."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from pipesched.cli.options import as_bytes
from pipesched.errors import ScheduleError
from pipesched.program.actions import Kind
from pipesched.program.completion import Completion
from pipesched.program.program import Program
from pipesched.simulation.links import Link, Links
from pipesched.simulation.trace import Trace
from pipesched.units import counted, quote_bytes, quote_time

__all__ = ["Replicas", "replica_options"]

_Command = TypeVar("_Command", bound=Callable[..., Any])
_BUCKETS = 4  # buckets of a stage's gradients


def replica_options(command: _Command) -> _Command:
    """Add the options that `Replicas.taken_from` reads."""
    for option in reversed(
        (
            click.option("--replicas", type=click.IntRange(min=1), default=1, help="Number of replicas.  [default: 1]"),
            click.option(
                "--zero",
                type=click.IntRange(0, 3),
                default=0,
                show_default=True,
                help="Training state split across replicas: 0 none, 1 optimizer, 2 also gradients, 3 also weights.",
            ),
            click.option(
                "--weight-bytes",
                default="1GB",
                show_default=True,
                callback=as_bytes,
                help="Size of a rank's weights, such as 2GB; the gradients have the same size. Used with --replicas.",
            ),
            click.option(
                "--replica-bandwidth",
                default="1GB",
                show_default=True,
                callback=as_bytes,
                help="Bytes per second between two replicas, such as 25GB; used with --replicas.",
            ),
            click.option(
                "--gather-once/--gather-often",
                default=True,
                help="With --zero 3: gather each stage's weights once per step, or free the weights while other stages "
                "of the rank run and gather them again.  [default: once]",
            ),
        )
    ):
        command = option(command)
    return command


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Replicas of a pipeline. All ranks hold weights of the same size, and all links have the same bandwidth."""

    count: int
    zero: int
    weight_bytes: int
    bytes_per_s: int
    gather_once: bool

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> "Replicas":
        """Remove the values of `replica_options` from ``options``, and return a Replicas with these values.

        Raises UsageError if ``--zero`` is set, but there is only one replica.
        """
        made = cls(
            count=options.pop("replicas"),
            zero=options.pop("zero"),
            weight_bytes=options.pop("weight_bytes"),
            bytes_per_s=options.pop("replica_bandwidth"),
            gather_once=options.pop("gather_once"),
        )
        if made.zero and made.count == 1:
            raise click.UsageError(
                f"--zero splits the state of a rank across replicas; got --zero {made.zero} and one replica; pass "
                f"--replicas 2 or more"
            )
        return made

    def add_collectives(self, program: Program) -> Program:
        """Add the REDUCEs and, with zero=3, the UNSHARDs and RESHARDs to the program of a replica."""
        if self.count == 1:
            return program
        if program.num_weights < program.num_stages or program.forward_only:
            has = f"{counted(program.num_stages, 'stage')} with {counted(program.num_weights, 'weight copy')}"
            raise ScheduleError(
                f"--replicas needs a schedule with backward passes and separate weights for each stage; "
                f"{program.name!r} has {'no backward passes' if program.forward_only else has}; leave --replicas out, "
                f"or choose another schedule, such as 1f1b"
            )
        buckets = (_BUCKETS,) * program.num_stages
        return Completion(buckets=buckets, gather_once=self.gather_once if self.zero == 3 else None).complete(program)

    def costs(self, program: Program) -> dict[str, Any]:
        """Return the times of the program's collectives, as fields of Costs."""
        if self.count == 1:
            return {}
        links = Links(inside=Link(bytes_per_s=self.bytes_per_s))
        ring = range(self.count)
        reduce = links.all_reduce_s if self.zero < 2 else links.reduce_scatter_s
        sizes = self._stage_bytes(program)
        stages = zip(sizes, program.buckets, strict=True)
        return {
            "reduce_s": tuple((reduce(size / max(1, count), ring),) * count for size, count in stages),
            "unshard_s": tuple(links.all_gather_s(size, ring) for size in sizes),
        }

    def lines(self, program: Program, trace: Trace) -> Iterator[str]:
        """Yield lines of text about the mesh axes, the bytes sent to other replicas, and the time of collectives.

        Yields nothing if there is only one replica.
        """
        if self.count == 1:
            return
        yield f"axes: pipeline {program.num_ranks} x replicate {self.count}" + (f", zero={self.zero}" * bool(self.zero))
        yield f"each rank sends to other replicas in a step: {'; '.join(self._sent(program))}"
        parts = [sum(part) for part in zip(*trace.communication_times, strict=True)]
        if total_s := sum(parts):
            shares = (f"{part / total_s:.1%}" for part in parts)
            names = ("in bubbles", "while computing", "exposed")
            hidden = ", ".join(f"{share} {name}" for share, name in zip(shares, names, strict=True))
            yield f"collectives take {quote_time(total_s)}, summed over {counted(program.num_ranks, 'rank')}: {hidden}"

    def _sent(self, program: Program) -> Iterator[str]:
        """Yield, as text, the bytes that a rank sends to other replicas in a step, assuming ring collectives."""
        share = (self.count - 1) / self.count
        ranks = range(program.num_ranks)
        held = [[stage for stage in program.chunks(rank) if program.buckets[stage]] for rank in ranks]
        sizes = self._stage_bytes(program)
        reduced = [sum(sizes[stage] for stage in own) * share * (1 if self.zero >= 2 else 2) for own in held]
        yield f"{_quoted(reduced)} of gradients"
        columns = program.columns
        counts = [int((columns.are(Kind.UNSHARD) & (columns.stage == s)).sum()) for s in range(program.num_stages)]
        if any(counts):
            gathered = [sum(counts[s] * sizes[s] for s in program.chunks(rank)) * share for rank in ranks]
            most = max(counts)
            often = "" if most == 1 else f", with up to {most} gathers per stage"
            yield f"{_quoted(gathered)} of weights{often}"
        elif self.zero:
            updated = [sum(sizes[stage] for stage in own) * share for own in held]
            yield f"{_quoted(updated)} of updated weights (not in the timeline)"

    def _stage_bytes(self, program: Program) -> list[float]:
        """Return the size of each stage's weights. The weights of a rank are divided equally among its stages."""
        return [self.weight_bytes / len(program.chunks(rank)) for rank in program.placement]


def _quoted(sizes: list[float]) -> str:
    """Return the sizes of all ranks as text: one size if all are equal, otherwise the smallest and the largest."""
    least, most = (quote_bytes(round(size)) for size in (min(sizes), max(sizes)))
    return least if least == most else f"{least} to {most}"
