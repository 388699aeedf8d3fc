"""The drawing of the packages in docs/architecture.md shows the rules for imports that `make check` enforces."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
CONTRACTS = {contract["name"]: contract for contract in SETTINGS["contracts"]}


def layers(contract: str) -> list[set[str]]:
    """Return the layers of a contract from top to bottom; packages of one layer do not import each other."""
    return [set(re.findall(r"\w+", layer)) for layer in CONTRACTS[contract]["layers"]]


def drawn(page: str) -> list[list[str]]:
    """Return the lines of the drawing from top to bottom, as the names before the description. A rule is ``[]``."""
    section = page.partition("## Package layers\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^    ([|+].*[|+])$", section, re.MULTILINE)
    names = [re.match(r"\| *((?:\w+ {1,2})*)", line) for line in lines]
    return [match[1].split() if match else [line] for line, match in zip(lines, names, strict=True)]


def in_order(names: list[str], contract: list[set[str]]) -> list[str]:
    """Return the names as the contract orders them; names of one layer keep the order in which they are given."""
    depth = {name: at for at, layer in enumerate(contract) for name in layer}
    assert [name for name in names if name not in depth] == []
    return sorted(names, key=depth.__getitem__)


def boxes(page: str) -> tuple[list[str], list[str], list[str]]:
    """Return the packages of the drawing, those inside the runtime, and those below the double line."""
    inside = [names for names in drawn(page) if names[0][0] != "+" and "executors" in names]
    outside = [names for names in drawn(page) if "executors" not in names]
    double = next(at for at, names in enumerate(outside) if names[0].startswith("+="))
    packages = [[name for names in part for name in names if name[0] != "+"] for part in (outside, outside[double:])]
    return packages[0], inside[0], packages[1]


def test_the_drawing_has_the_layers_of_the_contract() -> None:
    packages, _, _ = boxes(PAGE)
    contract = layers("Data flows one way")
    assert sorted(packages) == sorted(name for layer in contract for name in layer)
    assert packages == in_order(packages, contract)


def test_the_runtime_in_the_drawing_has_the_order_of_its_contract() -> None:
    _, inside, _ = boxes(PAGE)
    assert inside == in_order(inside, layers("Inside the runtime, too"))


def test_the_packages_below_the_double_line_may_not_import_torch() -> None:
    _, _, core = boxes(PAGE)
    listed = {name.removeprefix("pipesched.") for name in CONTRACTS["The core imports no torch"]["source_modules"]}
    assert {*core} == listed - {"cli"}  # cli is above the line, because it can call pipeline


@pytest.mark.parametrize(
    ("drawing", "other"),
    [
        ("| planning  ", "| viz       "),
        ("  torch_checks", ""),
        ("reductions  gradients", "gradients  reductions"),
        ("capture  model", "model  capture"),
    ],
)
def test_a_drawing_that_differs_is_noticed(drawing: str, other: str) -> None:
    assert PAGE.count(drawing) == 1
    packages, inside, _ = boxes(PAGE.replace(drawing, other))
    contract = layers("Data flows one way")
    assert (
        sorted(packages) != sorted(name for layer in contract for name in layer)
        or packages != in_order(packages, contract)
        or inside != in_order(inside, layers("Inside the runtime, too"))
    )
