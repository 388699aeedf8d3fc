"""Memory of a device in a pipeline's steps."""

from tests.support.device_memory import check_offloading_frees_memory


def test_the_bits_are_the_same_and_memory_is_given_back(sim):
    check_offloading_frees_memory("sim:0")
    assert not sim.judge.violations
