"""Daly's estimate of the best checkpoint interval."""

from math import inf

import pytest

from pipesched.errors import InputError
from pipesched.fleet import daly_interval_s
from pipesched.fleet.checkpoint_interval import expected_slowdown


@pytest.mark.parametrize("between_losses_s", [300, 3_600, 86_400])
@pytest.mark.parametrize("write_s", [1, 10, 100])
def test_the_estimate_is_close_to_the_minimum_of_the_expected_time(write_s, between_losses_s):
    """The minimum over a fine grid of intervals, which does not use the estimate."""

    def slowdown(interval_s):
        return expected_slowdown(interval_s, write_s, 120, between_losses_s)

    best = min(slowdown(between_losses_s * 1.01**-step) for step in range(900))
    assert slowdown(daly_interval_s(write_s, between_losses_s)) == pytest.approx(best, rel=0.002)


def test_the_estimate_of_the_paper():
    """Daly 2006, figures 3 to 5: 117, 57 and 9.1 minutes for M = 24 h, 6 h and 15 min, with dumps of 5 minutes."""
    assert [round(daly_interval_s(5, minutes), 1) for minutes in (24 * 60, 6 * 60, 15)] == pytest.approx(
        [117, 57, 9.1], rel=0.01
    )


def test_there_are_no_checkpoints_without_losses_and_no_longer_interval_than_between_losses():
    assert daly_interval_s(10, inf) == inf
    assert daly_interval_s(200, 100) == daly_interval_s(500, 100) == 100


@pytest.mark.parametrize("given", [(0, 100), (10, 0), (-1, 100)])
def test_times_must_be_above_0(given):
    with pytest.raises(InputError, match=r"must be above 0; got .*; pass a time in seconds"):
        daly_interval_s(*given)
