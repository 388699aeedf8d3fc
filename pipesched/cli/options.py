"""Options: types of the command's options, checked before anything is measured, and what its parts read and write."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pipesched.json_files import load_json
from pipesched.simulation.links import Links

__all__ = ["FILE", "INPUT", "MICROBATCHES", "PICTURE", "PLAN", "RANKS", "REPORT", "as_bytes", "read_links", "write"]

RANKS = 4
MICROBATCHES = 8
INPUT = click.Path(exists=True, dir_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)
PICTURES = (".png", ".svg", ".pdf")
TEXTS = (".html", ".txt", ".json")


class Output(click.Path):
    """A file to be written, in a folder that is there, whose ending is one of these."""

    def __init__(self, *endings: str) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)
        self._endings = endings

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path."""
        path = Path(str(super().convert(value, param, ctx)))
        if path.suffix not in self._endings:
            known = ", ".join(self._endings)
            self.fail(f"what is written ends in {known}; got {path.name!r}; give it such an ending", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"a file is written into a folder that is there; there is no {path.parent}; make it", param, ctx)
        return path


PICTURE = Output(*PICTURES)
PLAN = Output(".json")
REPORT = Output(*TEXTS, *PICTURES)


def as_bytes(_: Any, __: Any, text: str | None) -> int | None:
    """A number of bytes, as 16GB, 16GiB or 2e9."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+\.?\d*(?:e\d+)?) *([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise click.BadParameter(f"{text!r} is no number of bytes; pass such as 16GB, 16GiB or 2e9")
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))


def read_links(path: Path) -> Links:
    """What lies between ranks, from a file. Raises ScheduleError naming it."""
    return load_json(path, Links.from_dict)


def write(way: Callable[[Path], object], path: Path) -> None:
    """Write a file by what does it, and say so on stderr."""
    try:
        way(path)
    except OSError as error:
        raise click.FileError(str(path), error.strerror) from error
    click.echo(f"wrote {path}", err=True)
