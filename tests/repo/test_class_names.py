"""Class names: a class is found by its name, so no two classes of the package have the same name."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("pipesched", "viz", "schedules")


def classes_of(text: str) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]


def test_no_two_classes_have_the_same_name():
    places = defaultdict(list)
    for file in sorted(path.resolve() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for name in classes_of(file.read_text(encoding="utf-8")):
            places[name].append(str(file.relative_to(ROOT)))

    assert {name: {*files} for name, files in places.items() if len({*files}) > 1} == {}
    assert len(places) > 400


def test_classes_in_functions_and_classes_are_found():
    assert classes_of("class A:\n    class B: ...\ndef f():\n    class C: ...") == ["A", "B", "C"]
