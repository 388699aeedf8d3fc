"""A process whose layers have left holds no memory for them, however often the plan changes."""

from typing import Any

import pytest

from tests.support.jobs.replanned_memory import bytes_under_changes, check_no_growth
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.filterwarnings("ignore:BatchNorm sees")
_SCALARS = 1024  # bytes of losses, headers and counts of steps


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("changes", "options"),
    [
        (20, {"user": False, "built_on": "meta"}),
        (4, {"user": True}),
        (4, {"user": False, "built_on": "meta", "zero": 3}),
    ],
)
def test_over_processes(ranks: Ranks, changes: int, options: dict[str, Any]) -> None:
    for found in ranks.run(4 if "zero" in options else 2, bytes_under_changes, "cpu", changes, options):
        check_no_growth(found, _SCALARS)


def test_in_one_process() -> None:
    check_no_growth(bytes_under_changes(None, "cpu", 20, {"user": False}), _SCALARS)
