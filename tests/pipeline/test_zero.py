"""zero=: optimizer states and summed gradients divided over replicas, with the weights of the plain loop."""

import pytest
import torch
from torch import nn

from pipesched import Distributed
from pipesched.errors import InputError
from pipesched.runtime.gradients.shards import Shards, row_cuts
from tests.support.jobs import zero
from tests.support.jobs.zero import Case
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(60)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("dims", "case"),
    [
        ((2, 2), Case(1, zero.tied, "1f1b", zero.adamw, clips=True)),
        ((2, 2), Case(2, zero.tied, "interleaved-1f1b", zero.momentum, clips=True)),
        ((2, 2), Case(2, zero.plain, "zb-h1", zero.fused)),
        ((2, 2), Case(2, zero.in_halves, "1f1b", zero.momentum)),
        ((2, 2), Case(1, zero.in_halves, "zb-v", zero.masters)),
        ((2, 2), Case(3, zero.tied, "dualpipe-v", zero.adamw, clips=True)),
        ((2, 2), Case(3, zero.in_halves, "interleaved-1f1b", zero.masters)),
        ((4, 1), Case(1, zero.plain, "1f1b", zero.adafactor)),
        ((4, 1), Case(2, zero.plain, "1f1b", zero.by_layer, clips=True)),
        ((4, 1), Case(3, zero.plain, "1f1b", zero.adafactor)),
    ],
)
def test_weights_are_the_loops_and_states_are_divided(ranks: Ranks, dims: tuple[int, int], case: Case):
    sizes = ranks.run(4, zero.train, dims, case, 2)
    held, (whole, *_) = zip(*sizes, strict=True)
    assert sum(held) == whole
    assert max(held) < whole


def test_memory_falls_by_the_states_the_gradients_and_the_weights(ranks: Ranks):
    """Four layers a rank: weights and gradients of 4, states of 8 without zero=, 2 of them with 4 replicas.

    The peak of zero=2 and 3 depends on when sums end: at most, one gradient is being copied and one is being exchanged.
    """
    plain, states, gradients, weights = (ranks.run(4, zero.measure, (4, 1), level)[0] for level in range(4))
    assert [one.states for one in (plain, states, gradients, weights)] == [8, 2, 2, 2]
    assert [one.weights for one in (plain, states, gradients, weights)] == [4, 4, 4, 1]
    assert states.peak <= plain.peak - 6 + 0.1
    assert gradients.peak < states.peak - 1
    assert max(gradients.peak, weights.peak) <= 4 + 2 + 4 + 2 + 0.1


@pytest.mark.one_in(4)
@pytest.mark.parametrize("level", [1, 2, 3])
def test_an_overflow_in_one_replicas_rows_skips_all_updates(ranks: Ranks, level: int):
    ranks.run(4, zero.overflow, level)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_layer_used_in_one_replica_is_updated_in_all(ranks: Ranks, level: int):
    ranks.run(4, zero.use_in_one_replica, level)


def test_what_cannot_be_divided_is_refused(ranks: Ranks):
    ranks.run(4, zero.refuse)


@pytest.mark.parametrize("level", [4, -1, True, "1"])
def test_only_known_levels_are_accepted(level):
    with pytest.raises(InputError, match=r"zero= must be 0 .*; got .*; pass one of them"):
        Distributed(zero=level)


def test_pieces_start_at_multiples_of_64_numbers():
    for shape in ((64,), (200,), (1000, 3), (7, 64), (5, 4, 16), (129, 65)):
        for count in (1, 2, 3, 4):
            cuts = row_cuts(shape, count)
            if cuts is None:
                continue
            assert [start for start, _ in cuts] == [0, *(end for _, end in cuts[:-1])]
            assert cuts[-1][1] == shape[0]
            width = torch.Size(shape[1:]).numel()
            assert all(start * width % 64 == 0 and start < end for start, end in cuts)
    assert row_cuts((), 2) is row_cuts((63, 1), 2) is row_cuts((3, 64), 4) is row_cuts((0, 4), 2) is None


def test_whole_parameters_go_to_the_replica_with_the_fewest_numbers():
    sizes = [3, 40, 20, 30, 10]
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    held = []
    for replica in range(3):
        shards = Shards(parameters, replica, 3, cuts=False)
        held.append([len(one) for one in parameters if shards.own(one, one) is not None])
    assert held == [[40], [3, 30], [20, 10]]
