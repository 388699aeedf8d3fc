"""Transfers of layers between ranks."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pipesched import Link
from pipesched.fleet.transfers import assigned, held_layers, layer_moves
from tests.fleet.small_fleet import capacity
from tests.support.random_programs import quick

LAYERS = st.frozensets(st.integers(0, 5), max_size=6)
HELD = st.dictionaries(st.integers(0, 7), LAYERS, min_size=1, max_size=8)
SIZES = [3, 1, 4, 1, 5, 9]


@quick
@given(HELD, HELD)
def test_every_missing_byte_is_sent_once_by_a_rank_that_holds_it(held, wanted):
    there = held_layers(held.values())
    wanted = {rank: layers & there for rank, layers in wanted.items()}
    moved = layer_moves(wanted, held, SIZES)
    got = Counter()
    for (giver, taker), size in moved.sent.items():
        assert giver != taker
        assert size <= sum(SIZES[layer] for layer in held[giver] & wanted[taker] - held.get(taker, frozenset()))
        got[taker] += size
    missing = {rank: layers - held.get(rank, frozenset()) for rank, layers in wanted.items()}
    assert +got == +Counter({rank: sum(SIZES[layer] for layer in layers) for rank, layers in missing.items()})
    assert moved.total_bytes == sum(got.values())


@quick
@given(HELD, HELD)
def test_the_time_is_that_of_the_busiest_rank(held, wanted):
    wanted = {rank: layers & held_layers(held.values()) for rank, layers in wanted.items()}
    moved = layer_moves(wanted, held, SIZES)
    time_s = moved.time_s(Link(latency_s=0, bytes_per_s=2))
    ends = Counter()
    for (giver, taker), size in moved.sent.items():
        ends["out", giver] += size
        ends["in", taker] += size
    assert time_s == max(ends.values(), default=0) / 2


def test_senders_share_the_work():
    moved = layer_moves({9: frozenset({0, 1})}, {0: frozenset({0, 1}), 1: frozenset({0, 1})}, [5, 5])
    assert moved.sent == {(0, 9): 5, (1, 9): 5}
    assert moved.time_s(Link(latency_s=1, bytes_per_s=10)) == 3  # two messages of 1.5 s arrive at one rank


@quick
@given(st.sets(st.integers(0, 7), min_size=6), st.randoms(use_true_random=False))
def test_every_position_gets_its_ranks_and_nothing_moves_to_the_same_plan(ranks, random):
    plan = capacity().best(6)
    members = assigned(plan, ranks, {}, [1] * 12)
    assert Counter(members.values()) == Counter(dict.fromkeys(range(plan.depth), plan.num_replicas))
    assert members.keys() <= ranks
    held = {rank: plan.layers[position] for rank, position in members.items()}
    assert assigned(plan, random.sample(sorted(ranks), len(ranks)), held, [1] * 12) == members
    assert layer_moves(held, held, [1] * 12).total_bytes == 0


def test_ranks_without_layers_take_one_replica_after_another():
    plan = capacity().best(8)
    assert (plan.num_replicas, plan.depth) == (2, 4)
    assert assigned(plan, range(8), {}, [1] * 12) == {0: 0, 1: 1, 2: 2, 3: 3, 4: 0, 5: 1, 6: 2, 7: 3}
