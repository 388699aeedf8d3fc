"""The command ``pipesched``: list, show, check and compare schedules, without torch and in a moment; and cut models."""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from pipesched import __version__, schedules
from pipesched.cli.model_commands import graph, report, tune
from pipesched.cli.options import FILE, INPUT, MICROBATCHES, RANKS, read_links, write
from pipesched.errors import PipeschedError, ScheduleError
from pipesched.program.liveness import peak_in_flight
from pipesched.program.loading import load_program
from pipesched.program.program import Program
from pipesched.program.validation import validate
from pipesched.simulation.costs import Costs
from pipesched.simulation.simulator import simulate
from pipesched.simulation.trace import Trace
from pipesched.units import counted, quote_time
from pipesched.viz.text import text_timeline

__all__ = ["main"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


class _Commands(click.Group):
    """Commands whose errors of pipesched are one message on stderr and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PipeschedError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pipesched")
def main() -> None:
    """Study pipeline schedules: simulate, draw, check and compare them, without torch and without a GPU."""


for _command in (report, graph, tune):
    main.add_command(_command)


def _apply(command: _Command, *options: Callable[[_Command], _Command]) -> _Command:
    for option in reversed(options):
        command = option(command)
    return command


def _shape_options(command: _Command) -> _Command:
    count = click.IntRange(min=1)
    return _apply(
        command,
        click.option("--ranks", type=count, help=f"Number of ranks.  [default: {RANKS}]"),
        click.option("--microbatches", type=count, help=f"Number of micro-batches.  [default: {MICROBATCHES}]"),
    )


def _cost_options(command: _Command) -> _Command:
    """Times that all stages share. The names of the options are those of the fields of Costs."""
    share = "Seconds that a rank's part of the model takes for one micro-batch's {}. A chunk takes its share of it."
    work = {"forward": "forward", "input_grad": "input gradient", "weight_grad": "weight gradient"}
    texts = {name: share.format(what) for name, what in work.items()}
    texts["transfer"] = "Seconds that a tensor travels between two ranks."
    return _apply(
        command,
        *(
            click.option(
                f"--{name.replace('_', '-')}",
                f"{name}_s",
                type=click.FloatRange(min=0),
                default=0.0 if name == "transfer" else 1.0,
                show_default=True,
                help=text,
            )
            for name, text in texts.items()
        ),
        click.option("--links", type=INPUT, help="JSON of what lies between ranks, as Links.to_dict gives it."),
        click.option(
            "--output-bytes", type=click.IntRange(min=0), default=0, help="Bytes of a micro-batch's output over links."
        ),
    )


def _simulate(
    program: Program, *, transfer_s: float, links: Path | None, output_bytes: int, **rank_costs_s: float
) -> Trace:
    """Simulate with costs a rank, of which each of the chunks that a micro-batch visits there takes an equal share."""
    stage_costs: dict[str, Any] = {
        name: tuple(cost / share for share in program.shares) for name, cost in rank_costs_s.items()
    }
    costs = Costs(
        **stage_costs,
        transfer_s=transfer_s,
        output_bytes=(output_bytes,) * program.num_stages,
        links=None if links is None else read_links(links),
    )
    return simulate(program, costs)


def _read(path: str, *, max_in_flight: int | None = None, exact: bool = False) -> Program:
    """Read and validate a program, '-' from standard input; errors name the file."""
    try:
        program = _standard_input() if path == "-" else load_program(path)
    except OSError as error:
        raise click.FileError(path, error.strerror) from error
    try:
        validate(program, max_in_flight=max_in_flight, exact=exact)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error
    return program


def _standard_input() -> Program:
    try:
        with click.open_file("-", encoding="utf-8") as file:
            return Program.parse(file.read())
    except (ScheduleError, UnicodeDecodeError) as error:
        raise ScheduleError(f"-: {error}") from error


def _program(
    schedule: str, ranks: int | None, microbatches: int | None, chunks: int | None = None, steps: int = 1
) -> Program:
    """The program of a schedule's name, or the one that is written in a file."""
    if Path(schedule).is_file():
        return _read(schedule)
    options = {} if chunks is None else {"chunks_per_rank": chunks}
    return schedules.get(schedule).program(ranks or RANKS, microbatches or MICROBATCHES, steps=steps, **options)


@main.command("list")
def list_() -> None:
    """List the schedules: name, chunks a rank by default, and what each does."""
    width = max(map(len, schedules.names()))
    for name in schedules.names():
        schedule = schedules.get(name)
        chunks = counted(schedule.chunks_per_rank, "chunk").ljust(9)
        click.echo(f"{name.ljust(width)}  {chunks} {next(iter(schedule.description.splitlines()), '')}".rstrip())


@main.command()
@click.argument("schedule")
@_shape_options
@click.option("--chunks", type=click.IntRange(min=1), help="Chunks a rank.  [default: the schedule's]")
@click.option("--steps", type=click.IntRange(min=1), help="Steps of an asynchronous schedule, in a row.  [default: 1]")
@_cost_options
@click.option("--text", is_flag=True, help="Print the timeline as text, and the figures: the default.")
@click.option("--width", type=click.IntRange(min=20), help="Columns of the text.  [default: the terminal's]")
@click.option("--png", type=FILE, help="Draw the timeline into this file.")
@click.option("--chrome", type=FILE, help="Write Chrome's trace JSON, which Perfetto opens, into this file.")
@click.option("--program", "as_program", is_flag=True, help="Print the program in the form that `check` reads.")
def show(  # noqa: PLR0913  # one parameter an option
    schedule: str,
    *,
    ranks: int | None,
    microbatches: int | None,
    chunks: int | None,
    steps: int | None,
    text: bool,
    width: int | None,
    png: Path | None,
    chrome: Path | None,
    as_program: bool,
    **costs: Any,
) -> None:
    """Simulate SCHEDULE, a name from `list` or a file with a program, and show who computes what and when.

    Prints a text timeline with makespan, bubble (idle time over ranks x makespan), how far the makespan is above the
    bound that no schedule of these stages on these ranks can beat, span (the longest of the ranks' own last end minus
    first start) and the peaks of (stage, micro-batch) pairs in flight. Outputs combine. A file is what --program
    prints, or a .csv with a row a rank, as torch.distributed.pipelining writes.
    """
    if Path(schedule).is_file() and (ranks or microbatches or chunks or steps):
        raise click.UsageError(
            f"the program in {schedule} has its own shape; leave out --ranks, --microbatches, --chunks, --steps"
        )
    program = _program(schedule, ranks, microbatches, chunks, steps or 1)
    trace = _simulate(program, **costs)
    if as_program:
        click.echo(str(program), nl=False)
    if text or not (as_program or png or chrome):
        width = width or shutil.get_terminal_size((120, 24)).columns
        lines = f"{text_timeline(trace, width)}\n{_figures(trace)}"
        # After a program it is a comment, so that the whole still is one.
        click.echo("# " + lines.replace("\n", "\n# ") if as_program else lines)
    if png:
        from pipesched.viz import plot_timeline

        figure: Any = plot_timeline(trace).figure
        write(lambda path: figure.savefig(path, format="png"), png)
    if chrome:
        write(trace.to_chrome, chrome)


def _figures(trace: Trace) -> str:
    bound = "" if trace.bound_s is None else f"bound {quote_time(trace.bound_s)}; "
    versions = trace.peak_versions
    stashed = max(versions.values(), default=1) > 1
    held = f"; versions of weights a stage: {_numbers(versions.values())}" if stashed else ""
    return f"{bound}span {quote_time(trace.span_s)}; peak in flight a rank: {_numbers(trace.peak_in_flight)}{held}"


def _numbers(values: Iterable[int]) -> str:
    return " ".join(map(str, values))


@main.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option("--max-in-flight", type=click.IntRange(min=0), help="Most (stage, micro-batch) pairs that a rank holds.")
@click.option("--exact", is_flag=True, help="Demand ascending micro-batch order, so that results are equal to the bit.")
def check(file: str, max_in_flight: int | None, exact: bool) -> None:
    """Prove that the program in FILE ('-': standard input) is complete, ordered and free of deadlock.

    FILE is in the form that `show --program` prints, or a .csv with a row a rank, as torch.distributed.pipelining
    writes. Prints one line with its figures, or the first error with its place; the exit code then is 1.
    """
    program = _read(file, max_in_flight=max_in_flight, exact=exact)
    peaks = tuple(peak_in_flight(program.orders.rank(rank)) for rank in range(program.num_ranks))
    click.echo(
        f"OK: {counted(program.num_ranks, 'rank')}, {counted(program.num_stages, 'stage')}, "
        f"{counted(program.num_microbatches, 'micro-batch')}, "
        f"{'exact' if program.exact else 'not exact'}, peak in flight a rank: {_numbers(peaks)}"
    )


@main.command()
@click.argument("names", metavar="[SCHEDULE]...", nargs=-1)
@_shape_options
@_cost_options
@click.option("--png", type=FILE, help="Draw the timelines on one time scale into this file.")
def compare(
    names: tuple[str, ...], ranks: int | None, microbatches: int | None, png: Path | None, **costs: Any
) -> None:
    """Compare each SCHEDULE, a name from `list` or a file with a program; all that are listed by default.

    Each has its default chunks, and a program in a file its own shape. The peak is the most micro-batches in flight
    on a rank, in its whole part of the model: a chunk of it counts as its share. "above bound": how far the makespan
    is above what no schedule for these micro-batches, stages and ranks can beat, whatever its memory.
    """
    traces: dict[str, tuple[Program, Trace]] = {}
    for name in names or schedules.names():
        try:
            program = _program(name, ranks, microbatches)
        except ScheduleError as error:
            if names:
                raise
            click.echo(f"left out {name}: {error}", err=True)
            continue
        traces[name] = program, _simulate(program, **costs)
    width = max(map(len, ["schedule", *traces]))
    click.echo(f"{'schedule'.ljust(width)}  {'makespan':>10}  {'bubble':>6}  above bound  peak in flight")
    for name, (program, trace) in traces.items():
        above = "-" if trace.above_bound is None else f"{trace.above_bound:.1%}"
        times = f"{quote_time(trace.makespan_s):>10}  {trace.bubble_ratio:>6.1%}  {above:>11}"
        click.echo(f"{name.ljust(width)}  {times}  {_peak(program):>14.4g}")
    if png:
        from pipesched.viz import plot_compare

        write(
            lambda path: plot_compare([(name, t) for name, (_, t) in traces.items()]).savefig(path, format="png"), png
        )


def _peak(program: Program) -> float:
    """The most micro-batches in flight on a rank, each of its chunks counted as its share."""
    share = dict(zip(program.placement, program.shares, strict=True))
    ranks = range(program.num_ranks)
    return max(peak_in_flight(program.orders.rank(rank)) / share.get(rank, 1) for rank in ranks)
