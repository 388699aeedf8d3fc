"""The command ``pipesched``, and its subcommands for schedules. These subcommands run without torch."""

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import click

from pipesched import __version__, schedules
from pipesched.cli.checkpoint_command import checkpoint
from pipesched.cli.fleet_command import fleet
from pipesched.cli.model_commands import graph, report, tune
from pipesched.cli.options import FILE, INPUT, MICROBATCHES, RANKS, echo, read_links, write
from pipesched.cli.programs import program_of, read_source
from pipesched.cli.replicas import Replicas, replica_options
from pipesched.cli.run_command import run
from pipesched.cli.targets import is_target
from pipesched.errors import PipeschedError, ScheduleError
from pipesched.json_files import load_json
from pipesched.order import Schedule
from pipesched.program.liveness import peak_in_flight
from pipesched.program.placement import Placement
from pipesched.program.program import Program
from pipesched.simulation.best_known import best_known
from pipesched.simulation.bounds import lower_bound
from pipesched.simulation.costs import Costs
from pipesched.simulation.exact_solver import check_solver, solve
from pipesched.simulation.simulator import simulate_with_bound, step_time
from pipesched.simulation.trace import Trace
from pipesched.units import counted, quote_time
from pipesched.viz.text import text_timeline

__all__ = ["main"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


class _Commands(click.Group):
    """A command group that turns pipesched's errors into one message on stderr and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PipeschedError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pipesched")
def main() -> None:
    """Simulate, draw, check and compare pipeline schedules, plan pipelines for models, and start the ranks of a job.

    Only graph, run, and tune for a model, need torch. No command needs a GPU.

    \b
    Examples:
      pipesched show zb-h1 --ranks 4 --microbatches 8
      pipesched tune script.py:make --ranks 2 --batch 64 -o plan.json
    """


for _command in (report, graph, tune, checkpoint, fleet, run):
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
    """Add the options for times and links, named after fields of Costs. Each time applies to every rank."""
    share = "Seconds for the {} of one micro-batch on a rank, divided equally among the rank's chunks."
    work = {"forward": "forward", "input_grad": "input gradients", "weight_grad": "weight gradients"}
    texts = {name: share.format(words) for name, words in work.items()}
    texts["transfer"] = "Seconds to send a tensor from one rank to another."
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
        click.option(
            "--links", type=INPUT, help="Network links between ranks: a JSON file with the output of Links.to_dict()."
        ),
        click.option(
            "--output-bytes",
            type=click.IntRange(min=0),
            default=0,
            show_default=True,
            help="Bytes that a stage sends for one micro-batch; used with --links to compute transfer times.",
        ),
    )


def _simulate(
    program: Program,
    *,
    transfer_s: float,
    links: Path | None,
    output_bytes: int,
    collectives: Mapping[str, Any] = MappingProxyType({}),
    **rank_costs_s: float,
) -> Trace:
    """Simulate a program, given times per rank instead of per stage.

    Each of ``rank_costs_s`` is a rank's time for one micro-batch. This time is divided equally among the rank's stages
    that the micro-batch passes through. ``collectives`` holds the costs of reductions and gathers, as fields of Costs.
    """
    stage_costs: dict[str, Any] = {
        name: tuple(cost / share for share in program.shares) for name, cost in rank_costs_s.items()
    }
    costs = Costs(
        **stage_costs,
        transfer_s=transfer_s,
        output_bytes=(output_bytes,) * program.num_stages,
        links=None if links is None else read_links(links),
        **collectives,
    )
    return simulate_with_bound(program, costs)


def _names() -> list[str]:
    """Return the names of all schedules, including schedules that cut micro-batches into token slices."""
    return schedules.names(sliced=True)


@main.command("list", short_help="List all schedules.")
def list_() -> None:
    """List all schedules: name, default number of chunks on each rank, description.

    \b
    Example:
      pipesched list
    """
    width = max(map(len, _names()))
    for name in _names():
        schedule = schedules.get(name)
        chunks = counted(schedule.chunks_per_rank, "chunk").ljust(9)
        click.echo(f"{name.ljust(width)}  {chunks} {next(iter(schedule.description.splitlines()), '')}".rstrip())


@main.command(short_help="Simulate a schedule and draw its timeline.")
@click.argument("schedule")
@_shape_options
@click.option("--chunks", type=click.IntRange(min=1), help="Number of chunks on each rank.  [default: the schedule's]")
@click.option(
    "--steps", type=click.IntRange(min=1), help="Number of consecutive steps of an asynchronous schedule.  [default: 1]"
)
@_cost_options
@replica_options
@click.option(
    "--text",
    is_flag=True,
    help="Print the timeline and its metrics as text. This is the default if no other output is requested.",
)
@click.option("--width", type=click.IntRange(min=20), help="Width of the text in columns.  [default: the terminal's]")
@click.option("--png", type=FILE, help="Draw the timeline to this PNG file.")
@click.option("--chrome", type=FILE, help="Write the trace to this JSON file, for Perfetto or chrome://tracing.")
@click.option("--program", "as_program", is_flag=True, help="Print the program as text, for `pipesched check`.")
def show(  # noqa: PLR0913  # one parameter for each option
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
    **others: Any,
) -> None:
    """Simulate SCHEDULE and draw its timeline.

    SCHEDULE is a name from `pipesched list`; or file.py:function, a schedule of your own (also module:function); or a
    file with a program: the output of --program, or a .csv file of torch.distributed.pipelining with one row for each
    rank.

    The text output is a timeline with these figures: the makespan; the bubble, which is idle time / (ranks x makespan);
    the lower bound for any schedule of these stages on these ranks, and how far the makespan is above this bound; the
    span, which is the longest time from the start of a rank's first action to the end of its last action; and the peak
    number of (stage, micro-batch) pairs in flight on each rank. Several outputs can be combined.

    With --replicas, the timeline also shows how each rank sums gradients over the replicas, in 4 buckets per stage.
    With --zero 3, the timeline also shows how each rank gathers weights. The figures then include the bytes that a rank
    sends to other replicas in a step, and how much of this communication runs in bubbles, runs while the rank computes,
    or is exposed (the rank waits).

    \b
    Examples:
      pipesched show zb-h1 --ranks 4 --microbatches 8
      pipesched show 1f1b --ranks 4 --replicas 8 --zero 2
      pipesched show interleaved-1f1b --chunks 4 --png interleaved.png
      pipesched show my_schedules.py:one_by_one --ranks 4
      pipesched show 1f1b --program > mine.txt
    """
    source = read_source(schedule)
    _check_shape_is_free(source, schedule, ranks, microbatches, chunks, steps)
    replicas = Replicas.taken_from(others)
    program = program_of(schedule, source, ranks=ranks, microbatches=microbatches, chunks=chunks, steps=steps or 1)
    program = replicas.add_collectives(program)
    trace = _simulate(program, collectives=replicas.costs(program), **others)
    if as_program:
        click.echo(str(program), nl=False)
    if text or not (as_program or png or chrome):
        width = width or shutil.get_terminal_size((120, 24)).columns
        lines = "\n".join([text_timeline(trace, width), _figures(trace), *replicas.lines(program, trace)])
        # If a program comes first, the text is a comment, so that the whole output can be parsed as a program.
        echo("# " + lines.replace("\n", "\n# ") if as_program else lines)
    if png:
        from pipesched.viz import plot_timeline

        figure: Any = plot_timeline(trace).figure
        write(lambda path: figure.savefig(path, format="png"), png)
    if chrome:
        write(trace.to_chrome, chrome)


def _program(schedule: str, ranks: int | None, microbatches: int | None) -> Program:
    return program_of(schedule, read_source(schedule), ranks=ranks, microbatches=microbatches)


def _check_shape_is_free(source: Program | Schedule, name: str, *counts: int | None) -> None:
    """Raise UsageError if counts are given for a program, which has its own."""
    if isinstance(source, Program) and any(counts):
        raise click.UsageError(
            f"a program in a file has fixed numbers of ranks, micro-batches, chunks and steps; got an option "
            f"for one of these numbers with the file {name}; leave out --ranks, --microbatches, --chunks and "
            f"--steps"
        )


def _figures(trace: Trace) -> str:
    bound = "" if trace.bound_s is None else f"bound {quote_time(trace.bound_s)}; "
    versions = trace.peak_versions
    stashed = max(versions.values(), default=1) > 1
    held = f"; weight versions per stage: {_numbers(versions.values())}" if stashed else ""
    return f"{bound}span {quote_time(trace.span_s)}; peak in flight per rank: {_numbers(trace.peak_in_flight)}{held}"


def _numbers(values: Iterable[int]) -> str:
    return " ".join(map(str, values))


@main.command(short_help="Validate the program of a file or a function.")
@click.argument("file")
@_shape_options
@click.option(
    "--max-in-flight",
    type=click.IntRange(min=0),
    help="Maximum number of (stage, micro-batch) pairs in flight on a rank.  [default: no limit]",
)
@click.option("--exact", is_flag=True, help="Require ascending micro-batch order, for bit-identical results.")
def check(file: str, ranks: int | None, microbatches: int | None, max_in_flight: int | None, exact: bool) -> None:
    """Check that the program of FILE is complete, correctly ordered and free of deadlock.

    FILE is the output of `pipesched show --program`, a .csv file of torch.distributed.pipelining with one row for each
    rank, '-' for standard input, or file.py:function, a schedule of your own (also module:function). The options for
    the numbers of ranks and micro-batches apply only to schedules. If the program is valid, prints a summary in one
    line. Otherwise prints the first error and where it occurs, and exits with code 1.

    \b
    Examples:
      pipesched check mine.txt --max-in-flight 4
      pipesched check my_schedules.py:one_by_one --ranks 4 --microbatches 8
    """
    if not (file == "-" or is_target(file) or Path(file).is_file()):
        raise click.BadParameter(f"there is no file {file!r}; pass a file, '-' or file.py:function", param_hint="FILE")
    source = read_source(file)
    _check_shape_is_free(source, file, ranks, microbatches)
    limits: dict[str, Any] = {"max_in_flight": max_in_flight, "exact": exact}
    program = program_of(file, source, ranks=ranks, microbatches=microbatches, **limits)
    peaks = tuple(peak_in_flight(program.orders.rank(rank)) for rank in range(program.num_ranks))
    click.echo(
        f"OK: {counted(program.num_ranks, 'rank')}, {counted(program.num_stages, 'stage')}, "
        f"{counted(program.num_microbatches, 'micro-batch')}, "
        f"{'bit-identical results' if program.exact else 'results not bit-identical'}, "
        f"peak in flight per rank: {_numbers(peaks)}"
    )


@main.command(short_help="Write a program for another runtime.")
@click.argument("schedule")
@_shape_options
@click.option("--torch", "file", required=True, type=click.Path(dir_okay=False, path_type=Path), help="File to write.")
def export(schedule: str, ranks: int | None, microbatches: int | None, file: Path) -> None:
    """Write the program of SCHEDULE as a table that the runtime of torch.distributed.pipelining loads.

    SCHEDULE is a name from `pipesched list`, a file with a program, a plan that `pipesched tune` has written (.json),
    or file.py:function. Torch runs forwards and backwards on a chain of stages; anything else is refused.

    \b
    Examples:
      pipesched export zb-h1 --ranks 4 --microbatches 8 --torch order.csv
      pipesched export plan.json --torch order.csv
    """
    from pipesched.planning.plan import Plan  # imports networkx

    source = Plan.load(schedule).program if schedule.endswith(".json") else read_source(schedule)
    _check_shape_is_free(source, schedule, ranks, microbatches)
    program = program_of(schedule, source, ranks=ranks, microbatches=microbatches)
    write(program.to_torch, file)
    click.echo(f"{file}: {counted(program.num_ranks, 'rank')}, {counted(len(program.columns), 'action')}")


@main.command(short_help="Compare schedules: makespan, bubble, memory.")
@click.argument("names", metavar="[SCHEDULE]...", nargs=-1)
@_shape_options
@_cost_options
@click.option("--png", type=FILE, help="Draw the timelines, all on the same time scale, to this PNG file.")
def compare(
    names: tuple[str, ...], ranks: int | None, microbatches: int | None, png: Path | None, **costs: Any
) -> None:
    """Compare each SCHEDULE: a name from `pipesched list`, file.py:function, or a file with a program. Default: all.

    Schedules use their default number of chunks. The options for the numbers of ranks and micro-batches do not apply to
    programs in files. "above bound" is how far the makespan is above the lower bound for any schedule of these
    micro-batches, stages and ranks with unlimited memory. "peak in flight" is the largest number of micro-batches that
    a rank holds at the same time; a micro-batch that is held in only one of the rank's v chunks counts as 1/v.

    \b
    Example:
      pipesched compare gpipe 1f1b zb-h1 --ranks 4 --microbatches 8 --transfer 0.1
    """
    traces: dict[str, tuple[Program, Trace]] = {}
    for name in names or _names():
        try:
            program = _program(name, ranks, microbatches)
        except ScheduleError as error:
            if names:
                raise
            click.echo(f"skipped {name}: {error}", err=True)
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


@main.command(short_help="Print the lower bound on the makespan.")
@_shape_options
@_cost_options
@click.option("--placement", help="The rank of each stage, such as 0,1,1,0.  [default: one stage per rank]")
@click.option(
    "--costs", "file", type=INPUT, help="Costs of each stage: a JSON file with the output of Costs.to_dict()."
)
@click.option(
    "--max-in-flight",
    type=click.IntRange(min=1),
    help="Maximum number of (stage, micro-batch) pairs in flight on a rank.  [default: no limit]",
)
@click.option("--prove", is_flag=True, help="Let a solver find and prove the optimum. Needs pipesched[solver].")
@click.option(
    "--effort",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Limit on the solver's deterministic time; one unit takes about a second.",
)
@click.option("-o", "--output", type=FILE, help="Write the best program as text to this file.")
def bound(  # noqa: PLR0913  # one parameter for each option
    *,
    ranks: int | None,
    microbatches: int | None,
    placement: str | None,
    file: Path | None,
    max_in_flight: int | None,
    prove: bool,
    effort: float,
    output: Path | None,
    links: Path | None,
    output_bytes: int,
    **rank_costs_s: float,
) -> None:
    """Print a lower bound on the time of any schedule, and how far the fastest known program is above the bound.

    The bound ignores links and overheads. With --prove, a solver proves a bound for exact programs, in which
    each stage runs its micro-batches in ascending order.

    \b
    Examples:
      pipesched bound --ranks 4 --microbatches 8 --max-in-flight 3
      pipesched bound --costs costs.json --placement 0,1,1,0 --max-in-flight 4 --prove -o best.txt
    """
    if prove:
        check_solver()
    if links is not None or output_bytes:
        raise click.UsageError(
            "--links and --output-bytes must not be passed, because the bound ignores links; leave them out"
        )
    costs, ranks_of = _problem(ranks, placement, file, rank_costs_s)
    count = microbatches or MICROBATCHES
    least = lower_bound(costs, count, placement=ranks_of, max_in_flight=max_in_flight)
    limit = "" if max_in_flight is None else f", at most {max_in_flight} in flight per rank"
    click.echo(
        f"{counted(len(ranks_of), 'stage')} on {counted(max(ranks_of) + 1, 'rank')}, "
        f"{counted(count, 'micro-batch')}{limit}"
    )
    click.echo(f"bound       {quote_time(least)}")
    best = best_known(costs, count, ranks_of, max_in_flight)
    if best is None:
        click.echo("best known  none: no schedule from `pipesched list` has this placement and stays within the limit")
    else:
        makespan_s = step_time(best, costs)
        click.echo(f"best known  {quote_time(makespan_s)}, {best.name}, {_above(makespan_s, least)}")
    if prove:
        found = solve(costs, count, placement=ranks_of, max_in_flight=max_in_flight, start=best, effort=effort)
        best = found.program
        if found.makespan_s is None:
            click.echo(f"solver      no program found; bound {quote_time(found.bound_s)}")
        else:
            verdict = "proved optimal" if found.proved else _above(found.makespan_s, found.bound_s)
            click.echo(f"solver      {quote_time(found.makespan_s)}, bound {quote_time(found.bound_s)}, {verdict}")
    if output:
        if best is None:
            raise ScheduleError("--output needs a program; no program was found; pass --prove, or a larger --effort")
        text = str(best)
        write(lambda path: path.write_text(text), output)


def _above(makespan_s: float, bound_s: float) -> str:
    return f"{max(0.0, makespan_s / bound_s - 1) if bound_s else 0:.1%} above the bound"


def _problem(
    ranks: int | None, placement: str | None, file: Path | None, rank_costs_s: dict[str, float]
) -> tuple[Costs, Placement]:
    """Return the costs of each stage and the placement that the options describe."""
    given = None
    if placement is not None:
        try:
            given = tuple(map(int, placement.split(",")))
        except ValueError:
            raise click.UsageError(
                f"--placement must list the rank of each stage; got {placement!r}; for example, pass 0,1,1,0"
            ) from None
    if file is not None:
        costs = load_json(file, Costs.from_dict)
        return costs, tuple(range(costs.num_stages)) if given is None else given
    ranks_of = tuple(range(ranks or RANKS)) if given is None else given
    shares = [ranks_of.count(rank) for rank in ranks_of]
    stage_costs: dict[str, Any] = {
        name: tuple(cost / share for share in shares) for name, cost in rank_costs_s.items() if name != "transfer_s"
    }
    return Costs(**stage_costs, transfer_s=rank_costs_s["transfer_s"]), ranks_of


def _peak(program: Program) -> float:
    """Return the peak number of micro-batches in flight on a rank. A micro-batch in 1 of v chunks counts as 1/v."""
    share = dict(zip(program.placement, program.shares, strict=True))
    ranks = range(program.num_ranks)
    return max(peak_in_flight(program.orders.rank(rank)) / share.get(rank, 1) for rank in ranks)
