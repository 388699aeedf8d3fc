"""Options: the types and defaults of command-line options, and helpers that read and write files."""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import click

from pipesched.errors import InputError
from pipesched.json_files import load_json
from pipesched.simulation.links import Links
from pipesched.simulation.optimizer_state import OptimizerState, StateRule
from pipesched.simulation.tensor_layout import LayoutKind
from pipesched.units import parse_bytes
from pipesched.viz.blocks import encodable

__all__ = [
    "FILE",
    "INPUT",
    "MICROBATCHES",
    "PICTURE",
    "PLAN_OR_REPORT",
    "RANKS",
    "REPORT",
    "as_bytes",
    "as_optimizer",
    "as_replicas",
    "as_tensor_layouts",
    "as_tensor_parallel",
    "as_tensor_sizes",
    "echo",
    "read_links",
    "write",
]

RANKS = 4
MICROBATCHES = 8
INPUT = click.Path(exists=True, dir_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)
PICTURES = (".png", ".svg", ".pdf")
TEXTS = (".html", ".txt", ".json")


class Output(click.Path):
    """The path of a file to write. Its folder must exist, and its suffix must be one of ``endings``.

    The path is checked before a command measures or searches anything.
    """

    def __init__(self, *endings: str) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)
        self._endings = endings

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(str(super().convert(value, param, ctx)))
        if path.suffix not in self._endings:
            known = ", ".join(self._endings)
            self.fail(f"the file's suffix must be one of {known}; got {path.name!r}; change the suffix", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"the folder of the file must exist; there is no folder {path.parent}; create it", param, ctx)
        return path


PICTURE = Output(*PICTURES)
PLAN_OR_REPORT = Output(".json", ".html", ".txt", *PICTURES)
REPORT = Output(*TEXTS, *PICTURES)


def as_bytes(_: Any, __: Any, text: str | None) -> int | None:
    """Parse a number of bytes, such as ``16GB``, ``16GiB`` or ``2e9``; None is returned unchanged."""
    if text is None:
        return None
    size = parse_bytes(text)
    if size is None:
        raise click.BadParameter(f"{text!r} is not a number of bytes; for example, pass 16GB, 16GiB or 2e9")
    return size


def as_optimizer(_: Any, __: Any, text: str | None) -> OptimizerState | None:
    """Parse the name of an optimizer or a number of bytes for each parameter; None is returned unchanged."""
    if text is None:
        return None
    state: Any = text
    with suppress(ValueError):
        state = float(text)
    try:
        StateRule.of(state)
    except InputError as error:
        raise click.BadParameter(str(error)) from error
    return state  # type: ignore[no-any-return]  # checked above


def as_replicas(_: Any, __: Any, text: str | None) -> int | str | None:
    """Parse a number of replicas or "auto"; None is returned unchanged."""
    if text is None or text == "auto":
        return text
    if not text.isdecimal() or not int(text):
        raise click.BadParameter(f"{text!r} is not a number of replicas; pass a whole number of at least 1, or auto")
    return int(text)


def as_tensor_sizes(_: Any, __: Any, text: str | None) -> tuple[int, ...]:
    """Parse numbers of ranks that may split each layer, such as ``1,2,4,8``; None means 1."""
    sizes = "1" if text is None else text
    if not all(size.strip().isdecimal() and int(size) for size in sizes.split(",")):
        raise click.BadParameter(f"{text!r} is not a list of numbers of ranks; for example, pass 8, or 1,2,4,8")
    return tuple(map(int, sizes.split(",")))


def as_tensor_parallel(_: Any, __: Any, text: str | None) -> Any:
    """Parse names and styles of layers, such as ``*.up=column,*.down=row``, or "auto"; None is returned unchanged."""
    if text is None or text == "auto":
        return text
    pairs = [(name.strip(), style.strip()) for name, _, style in (pair.rpartition("=") for pair in text.split(","))]
    if not all(name and style for name, style in pairs):
        raise click.BadParameter(
            f"{text!r} is not a list of names and styles of layers; for example, pass '*.up=column,*.down=row', or auto"
        )
    return dict(pairs)


def as_tensor_layouts(_: Any, __: Any, text: str) -> tuple[str, ...]:
    """Parse layouts of the ranks that split each layer, such as ``1d,3d``."""
    kinds = tuple(map(str.strip, text.split(",")))
    if {*kinds} - {*get_args(LayoutKind)}:
        raise click.BadParameter(f"{text!r} is not a list of layouts; for example, pass 3d, or 1d,2d,2.5d,3d")
    return kinds


def read_links(path: Path) -> Links:
    """Load network links from a JSON file. Raises ScheduleError with the file's name."""
    return load_json(path, Links.from_dict)


def echo(text: str) -> None:
    """Print text to stdout. Letters replace the blocks of timelines if the encoding of stdout has no blocks."""
    click.echo(encodable(text, getattr(sys.stdout, "encoding", None) or "utf-8"))


def write(writer: Callable[[Path], object], path: Path) -> None:
    """Write a file by calling ``writer(path)``, and print the path to stderr."""
    try:
        writer(path)
    except OSError as error:
        raise click.FileError(str(path), error.strerror) from error
    click.echo(f"wrote {path}", err=True)
