"""Planted faults are found under their names, and the repaired programs are clean."""

import pytest

from tests.simulated.planted import FAULTS, verdict


@pytest.mark.one_in(4)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_and_the_repaired_program_is_clean(sim, fault):
    for _ in range(3):
        assert verdict(sim, fault, repaired=False) is None
        assert verdict(sim, fault, repaired=True) is None


def test_there_are_twenty_planted_faults():
    assert len({fault.name for fault in FAULTS}) >= 20
