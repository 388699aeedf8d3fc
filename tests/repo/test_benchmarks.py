"""Benchmarks import only names that exist: nothing else runs them, so a renamed function would break them unnoticed."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
FILES = sorted(FOLDER.glob("*.py"))


def names(file):
    """The names that a module defines or imports at its top level."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return found


def source(module):
    """The file of a module of the benchmarks or of the tests; None for other modules."""
    own = FOLDER / f"{module}.py"
    helper = ROOT / (module.replace(".", "/") + ".py")
    return next((file for file in (own, helper) if file.exists() and not module.startswith("pipesched")), None)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_imported_name_exists(file):
    missing = []
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        own = source(node.module)
        if own is not None:
            missing += [alias.name for alias in node.names if alias.name not in names(own)]
        elif node.module.partition(".")[0] in {"pipesched", "torch"}:
            module = importlib.import_module(node.module)
            missing += [
                alias.name
                for alias in node.names
                if not hasattr(module, alias.name) and f"{node.module}.{alias.name}" not in sys.modules
            ]
    assert not missing
