"""What docs/internals and docs/architecture.md name in backticks exists: files, classes and their members, names."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.distributed import fsdp
from torch.nn import functional

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs/internals").glob("*.md"), ROOT / "docs/architecture.md"])
TORCH = (torch, torch.nn, functional, torch.Tensor, torch.amp, torch.autograd.graph, fsdp, fsdp.MixedPrecisionPolicy)
#: Names of other things: targets of make, files of a checkpoint, and words of the user's code.
OTHERS = {"make check", "make gallery", "True", "False", "p", "y"}


def named(page):
    """The texts in backticks, without blocks of code."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return {" ".join(text.split()) for text in re.findall(r"`([^`]+)`", prose)}


@cache
def sources():
    files = (path for name in ("pipesched", "schedules", "viz") for path in sorted((ROOT / name).rglob("*.py")))
    return [ast.parse(path.read_text(encoding="utf-8")) for path in files]


@cache
def paths():
    """The paths of all files and folders, from the root of the repository."""
    folders = ("pipesched", "tests", "benchmarks", "docs", "schedules", "viz")
    found = [ROOT / "pyproject.toml", *(path for name in folders for path in [ROOT / name, *(ROOT / name).rglob("*")])]
    return {f"/{path.relative_to(ROOT).as_posix()}" + ("/" if path.is_dir() else "") for path in found}


@cache
def classes():
    """The names of the members of each class, with those of its bases."""
    members, bases = {}, {}
    for tree in sources():
        for own in ast.walk(tree):
            if isinstance(own, ast.ClassDef):
                members.setdefault(own.name, set()).update(names(own))
                bases.setdefault(own.name, set()).update(one.id for one in own.bases if isinstance(one, ast.Name))
    for name, own in members.items():
        queue = [*bases[name]]
        for base in queue:
            own.update(members.get(base, set()))
            queue += bases.get(base, set()) - {*queue}
    return members


def names(tree):
    """The names that a piece of code defines or uses, and its strings."""
    for own in ast.walk(tree):
        for field in ("id", "attr", "name", "arg", "module"):
            yield from str(getattr(own, field, "")).split(".")
        if isinstance(own, ast.Constant) and isinstance(own.value, str):
            yield own.value


@cache
def known():
    return {name for tree in sources() for name in names(tree)}


def is_known(text):
    """Whether a text in backticks names something that exists."""
    text = text.removeprefix("python ")
    if re.fullmatch(r"[\w./-]*(/|\.(py|md|toml))", text):
        return any(path.endswith(f"/{text}") for path in paths())
    strings = re.findall(r'"([^"]*)"', text)
    words = re.findall(r"[A-Za-z_]\w*", re.sub(r'"[^"]*"', "", text))
    member = re.match(r"(\w+)\.(\w+)", text)
    if member and member[1] in classes():
        return member[2] in classes()[member[1]]
    return text in OTHERS | known() or all(
        word in OTHERS | known() or any(hasattr(place, word) for place in TORCH) for word in (*strings, *words)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_on_the_internals_names_exists(page):
    assert [text for text in sorted(named(page)) if not is_known(text)] == []


@pytest.mark.parametrize(
    "text",
    [
        "program/vanished.py",
        "vanished/",
        "Stage.vanished",
        "_VANISHED",
        "vanished=",
        'checkpoint="vanished"',
        "vanished(program, costs)",
    ],
)
def test_what_does_not_exist_is_found(text):
    assert not is_known(text)
