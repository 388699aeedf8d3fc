"""Model commands: cut a model into stages, search for a plan, report a plan. Torch is imported only to run a model."""

import importlib.util
import shutil
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipesched import schedules
from pipesched.cli.options import (
    INPUT,
    MICROBATCHES,
    PICTURE,
    PLAN_OR_REPORT,
    RANKS,
    REPORT,
    as_bytes,
    as_optimizer,
    as_replicas,
    as_tensor_layouts,
    as_tensor_parallel,
    as_tensor_sizes,
    echo,
    read_links,
    write,
)
from pipesched.cli.programs import read_source
from pipesched.cli.targets import imported, is_target
from pipesched.errors import GraphError, ScheduleError
from pipesched.order import Schedule
from pipesched.program.program import Program
from pipesched.simulation.optimizer_state import OptimizerState
from pipesched.simulation.trace import Trace
from pipesched.units import counted
from pipesched.whole_files import write_whole

if TYPE_CHECKING:
    from pipesched.planning.plan import Plan

__all__ = ["graph", "report", "tune"]


@click.command(short_help="Explain a saved plan, and compare it with a measured step.")
@click.argument("plan", type=INPUT)
@click.argument("trace", type=INPUT, required=False)
@click.option(
    "-o",
    "--output",
    type=REPORT,
    multiple=True,
    help="Write the report to this .html, .txt, .json, .png, .svg or .pdf file.",
)
@click.option("--width", type=click.IntRange(min=20), help="Width of the text in columns.  [default: the terminal's]")
def report(plan: Path, trace: Path | None, *, output: tuple[Path, ...], width: int | None) -> None:
    """Explain PLAN, a file written by Plan.save: its stages, lower bound, predicted step time and alternatives.

    TRACE is a measured step, saved by Trace.to_chrome or as the JSON of Trace.to_dict. With TRACE, the report also
    compares the predicted and measured times of each stage. Without -o, the report is printed to the terminal, in
    colour if rich is installed.

    \b
    Examples:
      pipesched report plan.json
      pipesched report plan.json trace.json -o report.html
    """
    from pipesched.planning.plan import Plan
    from pipesched.planning.report.report import Report

    made = Report(Plan.load(plan), None if trace is None else Trace.load(trace))
    for path in output:
        write(_saver(made, width), path)
    if not output:
        _print(made, width)


def _print(report: Any, width: int | None) -> None:
    """Print a report: in colour if stdout is a terminal and rich is installed, else as plain text."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console

        Console(width=width).print(report)
    else:
        echo(report.text(width or shutil.get_terminal_size((120, 24)).columns))


def _saver(report: Any, width: int | None) -> Callable[[Path], object]:
    """Return a function that saves a report to a path. Timelines of a .txt file have the width, if it is given."""

    def save(path: Path) -> None:
        if path.suffix == ".txt" and width is not None:
            write_whole(path, f"{report.text(width)}\n")
        else:
            report.save(path)

    return save


@click.command(short_help="Measure a model's layers and cut them into stages.")
@click.argument("model")
@click.option("--stages", type=click.IntRange(min=1), default=RANKS, show_default=True, help="Number of stages.")
@click.option("-o", "--output", type=PICTURE, help="Draw the layers and cuts to this .png, .svg or .pdf file.")
def graph(model: str, *, stages: int, output: Path | None) -> None:
    """Measure the layers of MODEL on the CPU, cut them into stages, and explain the cuts.

    MODEL is file.py:function or module:function. The function takes no arguments and returns (model, sample), where
    sample is one micro-batch. Prints the layers, time, memory and traffic of each stage.

    \b
    Example:
      pipesched graph examples/u_net.py:small --stages 4 -o layers.png
    """
    import pipesched
    from pipesched.planning.pins import Pins
    from pipesched.planning.stage_partitioner import StagePartitioner

    made, sample = _model(model)
    layers = pipesched.graph_of(made, sample)
    program = schedules.get("1f1b").program(stages, MICROBATCHES)
    partitioner = StagePartitioner(pins=Pins(list(layers)), program=program, graph=lambda: layers)
    of_stages, found = partitioner.partition()
    partition = found or partitioner.evaluate(of_stages)
    click.echo(partition.with_class_names(layers.graph.get("classes", {})).explain())
    if output:
        from pipesched.viz import plot_layers

        figure: Any = plot_layers(layers, of_stages).figure
        write(figure.savefig, output)


@click.command(short_help="Search for the fastest plan for a model, a profile or a table.")
@click.argument("model", required=False)
@click.option("--table", type=INPUT, help="A CSV file with a row for each layer, in place of MODEL. Needs no torch.")
@click.option("--rows", type=click.IntRange(min=1), help="Rows of the micro-batch whose costs the table has.")
@click.option(
    "--optimizer",
    callback=as_optimizer,
    help="sgd, momentum, adam, adamw, or the bytes of state for each parameter.  [default: adam for a table, else that "
    "of the profile]",
)
@click.option("--ranks", type=click.IntRange(min=1), default=RANKS, show_default=True, help="Number of ranks.")
@click.option("--batch", type=click.IntRange(min=1), required=True, help="Number of rows in a batch.")
@click.option(
    "--replicas",
    callback=as_replicas,
    help="Number of replicas into which the ranks are divided, or auto.  [default: one pipeline]",
)
@click.option(
    "--zero",
    type=click.Choice(["auto", "0", "1", "2", "3"]),
    default="auto",
    show_default=True,
    help="Training state split across replicas: 0 none, 1 optimizer, 2 also gradients, 3 also weights.",
)
@click.option(
    "--tensor",
    callback=as_tensor_sizes,
    help="Number of ranks that split each layer, or the numbers from which to choose with --replicas auto, such as "
    "1,2,4,8.  [default: 1]",
)
@click.option(
    "--tensor-parallel",
    callback=as_tensor_parallel,
    help="The layers of MODEL that these ranks can split, and their styles, such as '*.up=column,*.down=row', or auto.",
)
@click.option(
    "--sequence-parallel", is_flag=True, help="These ranks also divide the sequence in norms and residual sums."
)
@click.option(
    "--tensor-layouts",
    callback=as_tensor_layouts,
    default="1d",
    show_default=True,
    help="The layouts from which to choose how these ranks divide matrices, such as 1d,2d,2.5d,3d.",
)
@click.option("--memory-limit", callback=as_bytes, help="Memory limit of each rank, such as 16GB.  [default: no limit]")
@click.option(
    "--schedule",
    default="auto",
    show_default=True,
    help="A name from `pipesched list`, file.py:function, or auto to search for one.",
)
@click.option("--microbatches", type=click.IntRange(min=1), help="Number of micro-batches.  [default: auto]")
@click.option(
    "--effort", type=click.IntRange(min=1), help="Number of actions that the search may simulate.  [default: 3,000,000]"
)
@click.option("--all-ranks", is_flag=True, help="Use every rank, even if a plan with fewer ranks is faster.")
@click.option(
    "--confirm",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Number of plans to run for a few steps, to correct the costs with measured times.",
)
@click.option(
    "--offload/--no-offload",
    default=None,
    help="Whether activations may be moved to the host to stay within the memory limit.  [default: if possible]",
)
@click.option(
    "--links", type=INPUT, help="Network links between ranks: a JSON file with the output of Links.to_dict()."
)
@click.option(
    "-o",
    "--output",
    type=PLAN_OR_REPORT,
    multiple=True,
    help="Write the plan to this .json file, or the report to this .html, .txt, .png, .svg or .pdf file.",
)
@click.option("--width", type=click.IntRange(min=20), help="Width of the text in columns.  [default: the terminal's]")
def tune(model: str | None, *, output: tuple[Path, ...], width: int | None, **choices: Any) -> None:
    """Search for the fastest plan for MODEL, and compare it with the alternatives.

    MODEL is a saved profile, or a function that returns a model and a sample. Write the function as for `pipesched
    graph`: file.py:function or module:function. The function's model is profiled before the search. With --table, the
    costs of the layers come from a CSV file with the columns name, forward_ms, backward_ms, parameter_bytes,
    output_bytes and activation_bytes. Identical profiles give identical plans. With --confirm, the best plans run for a
    few steps: on GPUs if there is one GPU for each rank, or else on the CPU. The measured times correct the costs, and
    the fastest plan is chosen.

    \b
    Examples:
      pipesched tune script.py:make --ranks 2 --batch 64 --confirm 3
      pipesched tune profile.json --ranks 4 --batch 64 --memory-limit 16GB -o plan.json
      pipesched tune profile.json --ranks 64 --batch 512 --replicas auto --memory-limit 72GB
      pipesched tune script.py:make --ranks 8 --batch 64 --replicas auto --tensor 1,2,4 --tensor-parallel auto
      pipesched tune --table layers.csv --rows 4 --batch 128 --ranks 64 --replicas auto --tensor 1,2,4,8
      pipesched tune --table layers.csv --batch 512 --ranks 64 --replicas auto --tensor 8,64 --tensor-layouts 1d,3d
      pipesched tune --table layers.csv --rows 4 --batch 128 --ranks 16 --links links.json -o plan.json -o plan.png
    """
    from pipesched.planning.report.report import Report

    ranks = choices["ranks"]
    plan = _tuned(model, **choices)
    used = plan.num_devices
    unused = [f"the plan uses {used} of {counted(ranks, 'rank')}"] if used < ranks else []
    report = Report(plan, notes=unused)
    _print(report, width)
    for path in output:
        write(plan.save if path.suffix == ".json" else _saver(report, width), path)


def _tuned(  # noqa: PLR0913  # one parameter for each option
    model: str | None,
    *,
    table: Path | None,
    rows: int | None,
    optimizer: OptimizerState | None,
    ranks: int,
    replicas: Any,
    zero: str,
    tensor: tuple[int, ...],
    tensor_parallel: Any,
    sequence_parallel: bool,
    tensor_layouts: tuple[str, ...],
    memory_limit: int | None,
    links: Path | None,
    confirm: int,
    batch: int,
    schedule: str,
    microbatches: int | None,
    effort: int | None,
    all_ranks: bool,
    offload: bool | None,
) -> "Plan":
    """Search for a plan for a model, a saved profile or a table. Torch is imported only for a model."""
    import pipesched

    if (model is None) == (table is None):
        got = "both" if model else "neither"
        raise click.UsageError(f"tune needs MODEL, or --table with a CSV file; got {got}; pass one of them")
    is_profile = model is not None and Path(model).is_file() and not model.endswith(".py")
    for option, only, is_passed in (
        ("--rows", "--table", rows and model),
        ("--confirm", "MODEL", confirm and table),
        ("--tensor-parallel", "file.py:function", tensor_parallel and (table or is_profile)),
    ):
        if is_passed:
            raise click.UsageError(f"{option} goes with {only} only; got {option} without {only}; leave {option} out")
    options: dict[str, Any] = {
        "num_ranks": ranks,
        "batch_size": batch,
        "memory_limit_bytes": memory_limit,
        "schedule": _schedule(schedule),
        "num_microbatches": microbatches,
        "effort": effort,
        "all_ranks": all_ranks,
        "offload": "auto" if offload is None else offload,
        "links": None if links is None else read_links(links),
        "axes": _axes(ranks, replicas, tensor),
        "tensor": tensor if replicas == "auto" else 1,
        "sequence_parallel": sequence_parallel,
        "tensor_layouts": tensor_layouts,
        "zero": int(zero) if zero.isdigit() else "auto",
        "optimizer": optimizer,
        "progress": sys.stderr.isatty(),
    }
    if table is not None:
        state: dict[str, Any] = {} if optimizer is None else {"optimizer": optimizer}
        return pipesched.tune_profile(pipesched.Profile.from_table(table, rows=rows, **state), **options)
    if is_profile and not confirm:
        return pipesched.tune_profile(str(model), ranks_are="threads", **options)
    of_model = (model,) if is_profile else _model(str(model))
    return pipesched.tune(*of_model, confirm=confirm, tensor_parallel=tensor_parallel, **options)


def _axes(ranks: int, replicas: Any, tensor: tuple[int, ...]) -> Any:
    """Return the argument ``axes`` for the options --replicas and --tensor."""
    if replicas == "auto" or (replicas is None and tensor == (1,)):
        return replicas
    if len(tensor) > 1:
        raise click.UsageError(
            f"--tensor with several numbers needs --replicas auto, which chooses among them; got --tensor "
            f"{','.join(map(str, tensor))}; pass one number, or --replicas auto"
        )
    count = replicas or 1
    groups = {} if tensor == (1,) else {"tensor": tensor[0]}
    return {"pipeline": ranks // (count * tensor[0]), "replicate": count, **groups}


def _schedule(text: str) -> str | Schedule:
    source = read_source(text) if is_target(text) else text
    if isinstance(source, Program):
        raise ScheduleError(
            f"--schedule must be a name or a schedule of your own; {text} is a program, which has fixed numbers of "
            f"ranks and micro-batches; pass a function (rank, shape) -> Order"
        )
    return source


def _model(target: str) -> tuple[Any, Any]:
    """Call the user's function and return its model and sample."""
    rule = "MODEL must be file.py:function or module:function"
    if not target.endswith((".py", ".py:")):
        rule += ", or, for tune, a saved profile"
    function = imported(target, rule, "make, where make() returns (model, sample)", GraphError)
    made = _called(function, target) if callable(function) else function
    if not isinstance(made, tuple) or len(made) != 2:
        raise GraphError(
            f"the function given as MODEL must return a model and a sample; {target} returned {type(made).__name__}; "
            f"return (model, sample)"
        )
    return made


def _called(function: Callable[..., Any], target: str) -> Any:
    try:
        signature(function).bind()
    except TypeError as error:
        raise GraphError(
            f"the function given as MODEL must be callable without arguments; {target} has the signature "
            f"{signature(function)} ({error}); give each argument a default"
        ) from None
    return function()
