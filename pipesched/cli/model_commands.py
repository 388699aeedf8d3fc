"""Model commands: those that cut and tune models, and report what was planned; they import torch where they need it."""

import importlib.util
import shutil
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import click

from pipesched import schedules
from pipesched.cli.options import (
    INPUT,
    MICROBATCHES,
    PICTURE,
    PLAN,
    RANKS,
    REPORT,
    as_bytes,
    read_links,
    write,
)
from pipesched.errors import GraphError
from pipesched.simulation.trace import Trace
from pipesched.units import counted

__all__ = ["graph", "report", "tune"]


@click.command()
@click.argument("plan", type=INPUT)
@click.argument("trace", type=INPUT, required=False)
@click.option("-o", "--output", type=REPORT, multiple=True, help="Write a page (.html), picture (.png) or text (.txt).")
@click.option("--width", type=click.IntRange(min=20), help="Columns of the text.  [default: the terminal's]")
def report(plan: Path, trace: Path | None, *, output: tuple[Path, ...], width: int | None) -> None:
    """Explain PLAN, as Plan.save writes it: what was weighed, its stages, the bound, the predicted step.

    With TRACE, a measured step as Trace.to_chrome or to_dict gives it, predicted and measured stand beside each other,
    stage by stage. Prints to the terminal (in colour where rich is installed) unless there is a file to write.
    """
    from pipesched.planning.plan import Plan
    from pipesched.planning.report import Report

    made = Report(Plan.load(plan), None if trace is None else Trace.load(trace))
    for path in output:
        write(made.save, path)
    if not output:
        _print(made, width)


def _print(report: Any, width: int | None) -> None:
    """To a terminal in colour, where rich is installed, else as plain text."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console

        Console(width=width).print(report)
    else:
        click.echo(report.text(width or shutil.get_terminal_size((120, 24)).columns))


@click.command()
@click.argument("model")
@click.option("--stages", type=click.IntRange(min=1), default=RANKS, show_default=True, help="Number of stages.")
@click.option("-o", "--output", type=PICTURE, help="Draw the layers with their cuts into this file.")
def graph(model: str, *, stages: int, output: Path | None) -> None:
    """Measure the layers of MODEL, cut them into stages, and say what each stage has, sends and costs, and why.

    MODEL is file.py:function or module:function; the function takes nothing and returns (model, sample), as Pipeline
    takes them. This command imports torch and runs the model on the CPU.
    """
    import pipesched
    from pipesched.planning.pins import Pins
    from pipesched.planning.stage_partitioner import StagePartitioner

    made, sample = _model(model)
    layers = pipesched.graph_of(made, sample)
    program = schedules.get("1f1b").program(stages, MICROBATCHES)
    partitioner = StagePartitioner(pins=Pins(list(layers)), program=program, graph=lambda: layers)
    of_stages, found = partitioner.partition()
    click.echo((found or partitioner.evaluate(of_stages)).explain())
    if output:
        from pipesched.viz import plot_layers

        figure: Any = plot_layers(layers, of_stages).figure
        write(figure.savefig, output)


@click.command()
@click.argument("model")
@click.option("--ranks", type=click.IntRange(min=1), default=RANKS, show_default=True, help="Number of ranks.")
@click.option("--batch", type=click.IntRange(min=1), required=True, help="Rows of a step.")
@click.option("--memory-limit", callback=as_bytes, help="What a rank may hold, such as 16GB.")
@click.option("--schedule", default="auto", show_default=True, help="A name from `list`, where it is given.")
@click.option("--microbatches", type=click.IntRange(min=1), help="Number of micro-batches, where it is given.")
@click.option("--all-ranks", is_flag=True, help="Leave no rank out.")
@click.option("--confirm", type=click.IntRange(min=0), default=0, show_default=True, help="So many plans run first.")
@click.option("--offload/--no-offload", default=None, help="Whether activations may wait on the host.  [default: auto]")
@click.option("--links", type=INPUT, help="JSON of what lies between ranks, as Links.to_dict gives it.")
@click.option("-o", "--output", type=PLAN, help="Write the plan into this file, for Pipeline(plan=Plan.load(...)).")
@click.option("--width", type=click.IntRange(min=20), help="Columns of the text.  [default: the terminal's]")
def tune(  # noqa: PLR0913  # one parameter an option
    model: str,
    *,
    ranks: int,
    batch: int,
    memory_limit: int | None,
    schedule: str,
    microbatches: int | None,
    all_ranks: bool,
    confirm: int,
    offload: bool | None,
    links: Path | None,
    output: Path | None,
    width: int | None,
) -> None:
    """Search the fastest plan for MODEL on so many ranks, and say what it was weighed against.

    MODEL is a saved profile, or file.py:function or module:function as for `graph`, to be measured. Equal profiles
    give equal plans. With --confirm so many of the best plans run for some steps, on as many GPUs as ranks where there
    are so many, else on the CPU; what they take corrects the costs and decides.
    """
    import pipesched
    from pipesched.planning.report import Report

    made = (model,) if Path(model).is_file() and not model.endswith(".py") else _model(model)
    plan = pipesched.tune(
        *made,
        num_ranks=ranks,
        batch_size=batch,
        memory_limit_bytes=memory_limit,
        schedule=schedule,
        num_microbatches=microbatches,
        all_ranks=all_ranks,
        confirm=confirm,
        offload="auto" if offload is None else offload,
        links=None if links is None else read_links(links),
        progress=sys.stderr.isatty(),
    )
    used = plan.program.num_ranks
    unused = [f"{counted(ranks - used, 'rank')} of {ranks} not used, as the plan has {used}"] if used < ranks else []
    _print(Report(plan, notes=unused), width)
    if output:
        write(plan.save, output)


def _model(target: str) -> tuple[Any, Any]:
    """The model and the sample that a function of the user's makes."""
    place, _, name = target.rpartition(":")
    if target.endswith((".py", ".py:")):
        raise GraphError(
            f"MODEL is file.py:function or module:function; {target!r} names no function; pass such as "
            f"{target.removesuffix(':')}:make, where make() returns (model, sample)"
        )
    try:
        function: Callable[[], Any] = getattr(_module(place), name)
    except (ImportError, OSError, AttributeError, ValueError) as error:
        raise GraphError(
            f"MODEL is file.py:function or module:function, of tune also a saved profile; {target!r} is none that can "
            f"be imported: {error if place else 'it names no function'}; correct the path or the name"
        ) from error
    made = _called(function, target) if callable(function) else function
    if not isinstance(made, tuple) or len(made) != 2:
        raise GraphError(
            f"the function returns a pair of a model and a sample; {target} returned {type(made).__name__}; "
            f"return (model, sample)"
        )
    return made


def _called(function: Callable[..., Any], target: str) -> Any:
    try:
        signature(function).bind()
    except TypeError as error:
        raise GraphError(
            f"the function takes nothing and returns (model, sample); {target} takes {signature(function)} ({error}); "
            f"give each argument a default"
        ) from None
    return function()


def _module(place: str) -> Any:
    """What lies in a file, or a module that can be imported from here."""
    if not place.endswith(".py"):
        sys.path.insert(0, "")
        return importlib.import_module(place)
    path = Path(place).resolve()
    sys.path.insert(0, str(path.parent))  # as python does for a script
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} is no file of Python")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
