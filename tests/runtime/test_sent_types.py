"""What layers pass on from rank to rank, by its type: trained to the bit, or refused when the pipeline is made."""

import pytest

from tests.support.jobs import strangers as jobs
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(60)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [name for name in jobs.WRAPS if name != "opaque"])
def test_values_of_types_that_the_capture_shows_are_passed_on(ranks: Ranks, name: str) -> None:
    """Gradients of tensors in a dataclass come back as those of any other tensor."""
    if name == "model output":
        pytest.importorskip("transformers")
    ranks.run(2, jobs.passes_on, name)


def test_another_value_is_refused_when_the_pipeline_is_made(ranks: Ranks) -> None:
    for said in ranks.run(2, jobs.opaque, 2):
        assert said.startswith("GraphError: the output of layer '1' must be sent between stages; only tensors, numbers")
        assert "got tests.support.jobs.strangers.Opaque; pass its parts in a tuple or dict" in said


@pytest.mark.parametrize("boundary", [1, 3])
def test_within_a_stage_layers_pass_on_what_they_like(ranks: Ranks, boundary: int) -> None:
    assert ranks.run(2, jobs.opaque, boundary) == ["it trains", "it trains"]


def test_outputs_of_a_known_type_come_to_all_ranks(ranks: Ranks) -> None:
    assert ranks.run(2, jobs.outputs_for_all, False) == [(True, True)] * 2


def test_outputs_that_cannot_be_sent_are_an_error_on_all_ranks(ranks: Ranks) -> None:
    for said in ranks.run(2, jobs.outputs_for_all, True):
        assert "got tests.support.jobs.strangers.Opaque" in said


def test_a_target_of_a_type_that_nobody_has_seen_is_an_error_on_all_ranks(ranks: Ranks) -> None:
    (one, said), (other, heard) = ranks.run(2, jobs.targets_of_a_type)
    assert one == other
    assert all("tests.support.jobs.strangers.Colour did not occur with the sample" in text for text in (said, heard))
