"""Pipelines over several processes run on simulated devices, with the bits of the CPU and without a race."""

import pytest

from tests.simulated.process_features import FEATURES, compared
from tests.simulated.rank_devices import judged


@pytest.mark.one_in(18)
@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_has_the_bits_of_the_cpu_and_no_race_in_any_process(ranks, name):
    for judgement in ranks.run(FEATURES[name][0], judged, compared, name, timeout_s=60):
        assert judgement.result is True, judgement.result
        assert judgement.cut_off == [] or name == "a failed step"
        assert judgement.num_transfers
        assert not judgement.violations, judgement.violations[0]
