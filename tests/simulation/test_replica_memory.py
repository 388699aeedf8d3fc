"""Memory of replicas: the table of the ZeRO paper, and copies of gradients followed by hand through small programs."""

import pytest

from pipesched import Costs, Program
from pipesched.simulation.memory import rank_memory
from pipesched.simulation.replica_memory import CopyMemory, ModelStates, ReplicaMemory, held_states

GB = 10**9


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_model_states_of_the_zero_paper(zero, gigabytes):
    """Figure 1 of Rajbhandari et al. 2020: 7.5 billion parameters, 64 devices, 2 + 2 + 12 bytes a parameter."""
    parameters = 7_500_000_000
    whole = ModelStates(weights=2 * parameters, gradients=2 * parameters, optimizer=12 * parameters)
    part = ModelStates(*(size // 64 for size in whole))
    held = held_states(whole, part, zero=zero, once=False).total_bytes / GB
    assert held == pytest.approx(gigabytes, abs=0.05 if zero < 3 else 0.005)


def test_states_that_are_reduced_and_gathered_once_are_whole_within_a_step():
    whole, part = ModelStates(20, 40, 80), ModelStates(5, 10, 20)
    assert held_states(whole, part, zero=2) == (20, 40, 20)
    assert held_states(whole, part, zero=3) == (20, 40, 20)


def held(text, stages, **costs):
    program = Program.parse(f"microbatches 1\nplacement {' 0' * len(stages)}\nrank 0: {text}\n")
    ones = (1,) * len(stages)
    return rank_memory(program, Costs(forward_s=ones, input_grad_s=ones, weight_grad_s=ones, **costs), replicas=stages)[
        0
    ]


def test_divided_sums_replace_gradients_and_stay_until_the_update():
    """Two buckets for 2 replicas. The copy of the second is made while the first is being added."""
    copies = CopyMemory(buffer=8, working=12, summed=4, kept=4, released=8)
    stage = ReplicaMemory(buckets=(copies, copies._replace(buffer=9)))
    costs = {"gradient_bytes": (0, 16), "first_backward_transient_bytes": (0, 16)}
    found = held("0F0 1F0 1B0 1REDUCE0 1REDUCE1 1UPDATE0 0B0", [ReplicaMemory(), stage], **costs)
    assert (found.gradients, found.reductions) == (16 - 8, 8 + 9 + 12)
    found = held("0F0 1F0 1B0 1REDUCE0 1REDUCE1 1UPDATE0 0B0", [ReplicaMemory(), stage], update_transient_bytes=(0, 99))
    assert (found.reductions, found.transients) == (4 + 4, 99)


def test_a_rank_that_waits_for_a_gather_has_waited_for_earlier_sums():
    """A sum copies 10 bytes, needs 12 more while it runs, and leaves 4. A gather holds 7 bytes, and 3 more."""
    gathers = ReplicaMemory(gather=CopyMemory(buffer=7, working=3, summed=7))
    sums = ReplicaMemory(buckets=(CopyMemory(buffer=10, working=12, summed=4),))
    order = "1UNSHARD0 0UNSHARD0 0F0 0RESHARD0 1F0 1B0 1RESHARD0 1REDUCE0 0UNSHARD1 0B0 0RESHARD1"
    found = held(order, [gathers, sums], backward_transient_bytes=(50, 1))
    assert (found.reductions, found.transients) == (4, 50)  # 0B0 waits for the gather
    found = held(order, [gathers, sums])
    assert found.reductions == 10 + 12 + 7


@pytest.mark.parametrize("uses", ["0F0 0B0 0RESHARD0", "0F0 0RESHARD0 0UNSHARD1 0B0 0RESHARD1"])
def test_a_reshard_copies_rows_before_it_frees_the_whole_weight(uses):
    """A gather needs 7 + 3 bytes, and the copy of rows 5 or 20."""
    for cut, most in ((5, 10), (20, 20)):
        stage = ReplicaMemory(gather=CopyMemory(buffer=7, working=3, summed=7), cut=cut)
        found = held(f"0UNSHARD0 {uses}", [stage], gathered_bytes=(100,))
        assert (found.gathered, found.reductions) == (100, most)


def test_an_exchange_of_weights_lasts_beyond_its_update():
    stages = [ReplicaMemory(), ReplicaMemory(spread=30)]
    found = held("0F0 1F0 1B0 1UPDATE0 0B0", stages, backward_transient_bytes=(50, 1))
    assert (found.reductions, found.transients) == (30, 50)
    found = held("0F0 1F0 1B0 1UPDATE0 0B0", stages, update_transient_bytes=(0, 40))
    assert (found.reductions, found.transients) == (0, 40)  # the exchange follows the optimizer's step


def test_a_bucket_within_a_backward_starts_when_activations_are_freed():
    late = CopyMemory(buffer=10, working=10, summed=10, freed=25)
    found = held("0F0 0B0 0REDUCE0", [ReplicaMemory(buckets=(late,))], activation_bytes=(30,))
    assert found.total_bytes == 30
    found = held("0F0 0B0 0REDUCE0", [ReplicaMemory(buckets=(late._replace(freed=0),))], activation_bytes=(30,))
    assert found.total_bytes == 30 + 20


def test_gradients_that_are_reduced_after_the_run_need_memory_then():
    late = CopyMemory(buffer=10, working=7, summed=10)
    found = held("0F0 0B0", [ReplicaMemory(late=late)], gradient_bytes=(9,), weight_bytes=(100,))
    assert (found.parameters, found.gradients, found.reductions, found.transients) == (100, 9, 10, 7)
