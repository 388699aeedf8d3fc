"""No file grows beyond what a reader takes in at one sitting."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(
    path.relative_to(ROOT) for folder in ("pipesched", "schedules", "viz") for path in (ROOT / folder).rglob("*.py")
)


def lines(path):
    return len((ROOT / path).read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_file_has_at_most_450_lines(path):
    assert lines(path) <= 450, f"{path} has {lines(path)} lines; find the second thing in it and give it its own file"


@pytest.mark.parametrize("path", sorted(Path(ROOT / "schedules").glob("[!_]*.py")), ids=lambda path: path.name)
def test_a_schedule_has_at_most_45_lines(path):
    assert lines(path) <= 45, f"{path.name} has {lines(path)} lines; a schedule is one rule"
