"""How long files are."""

import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path.relative_to(ROOT) for folder in ("pipesched", "schedules", "viz") for path in (ROOT / folder).rglob("*.py")
)


def lines(path):
    return len((ROOT / path).read_text(encoding="utf-8").splitlines())


def test_a_file_of_more_than_600_lines_is_named():
    """A file has one role; how long that makes it is for its reader to judge."""
    assert len(FILES) > 100
    for path in FILES:
        if lines(path) > 600:
            warnings.warn(f"{path} has {lines(path)} lines; does it hold two things?", stacklevel=1)


@pytest.mark.parametrize("path", sorted(Path(ROOT / "schedules").glob("[!_]*.py")), ids=lambda path: path.name)
def test_a_schedule_has_at_most_45_lines(path):
    assert lines(path) <= 45, f"{path.name} has {lines(path)} lines; a schedule is one rule"
