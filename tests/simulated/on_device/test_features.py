"""All that a pipeline can do runs on simulated devices, with the bits of the CPU and without a race."""

import pytest
import torch

from pipesched.errors import TorchVersionError
from tests.simulated.actions import label_actions
from tests.simulated.features import FEATURES, outcome, same


@pytest.mark.one_in(12)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_has_the_bits_of_the_cpu_and_no_race(sim, name):
    torch.set_num_threads(1)
    label_actions(sim)
    try:
        expected = outcome(name, "cpu")
    except TorchVersionError as error:
        pytest.skip(str(error))
    sim.judge.forget()
    assert same(expected, outcome(name, "sim"))
    assert not sim.judge.violations, str(sim.judge.violations[0])
