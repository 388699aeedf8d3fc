"""Memory of a device in pipelines."""

import pytest

from tests.simulated.rank_devices import judged
from tests.support.device_memory import check_offloading_frees_memory
from tests.support.jobs.replanned_memory import bytes_under_changes, check_no_growth

#: Bytes of the four messages of a step, whose memory a rank keeps for later steps.
_MESSAGES = 4 * 512


def test_the_bits_are_the_same_and_memory_is_given_back(sim):
    check_offloading_frees_memory("sim:0")
    assert not sim.judge.violations


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("changes", "options"),
    [
        (20, {"user": True, "built_on": "meta"}),
        (6, {"user": False}),
        (4, {"user": False, "built_on": "meta", "zero": 3}),
    ],
)
def test_after_changes_of_the_plan_a_device_holds_what_it_holds_in_a_new_pipeline(ranks, changes, options):
    for judgement in ranks.run(4 if "zero" in options else 2, judged, bytes_under_changes, "sim", changes, options):
        assert isinstance(judgement.result, dict), judgement.result
        check_no_growth(judgement.result, _MESSAGES)
        assert not judgement.violations, judgement.violations[0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("user", [True, False])
def test_so_do_the_devices_of_one_process(sim, user):
    check_no_growth(bytes_under_changes(None, "sim", 20 if user else 4, {"user": user}), _MESSAGES)
    assert not sim.judge.violations, sim.judge.violations[0]
