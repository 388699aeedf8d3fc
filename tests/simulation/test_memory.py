import pytest

from pipesched import Costs, Program, schedules
from pipesched.errors import ScheduleError
from pipesched.program.lowering import add_offloading, add_recompute, add_updates, lower
from pipesched.simulation.layer_memory import LayerMemory, dropping_bytes
from pipesched.simulation.memory import RankMemory, rank_memory
from pipesched.simulation.simulator import simulate

SIZES = {
    "weight_bytes": 1000,
    "gradient_bytes": 900,
    "optimizer_bytes": 2000,
    "buffer_bytes": 30,
    "activation_bytes": 100,
    "input_bytes": 10,
    "weight_grad_bytes": 20,
    "forward_transient_bytes": 3,
    "backward_transient_bytes": 5,
    "output_bytes": 7,
}
STATIC = {"parameters": 1000, "buffers": 30, "optimizer": 2000}


def memory(name: str, num_ranks: int, num_microbatches: int, checkpoint="never", **sizes: int):
    program = schedules.get(name).program(num_ranks, num_microbatches)
    costs = Costs.uniform(program.num_stages, **{**SIZES, **sizes})
    return rank_memory(add_recompute(program, checkpoint), costs)


def test_the_parts_of_a_rank_where_it_holds_the_most():
    found = memory("1f1b", 2, 4)
    assert found[0] == RankMemory(
        **STATIC, batch=40, gradients=0, activations=200, weight_grads=0, stashed=0, messages=7, transients=905
    )  # in the first backward, which makes gradients
    assert found[1].activations == 100  # of one micro-batch
    assert found[0].total_bytes == 1000 + 30 + 2000 + 40 + 900 + 200 + 7 + 5


def test_gpipe_holds_all_micro_batches_and_checkpointed_ones_their_inputs_and_buffers():
    assert [one.activations for one in memory("gpipe", 2, 5, backward_transient_bytes=9000)] == [500, 500]
    checkpointed = memory("gpipe", 2, 5, "always", backward_transient_bytes=9000)
    # four inputs with buffers, those of the first stage in the batch, and one micro-batch's activations with buffers
    assert [one.activations for one in checkpointed] == [4 * 30 + 130, 4 * 40 + 130]
    assert [one.batch for one in checkpointed] == [50, 0]


def test_between_input_and_weight_gradients_something_is_kept():
    assert all(one.weight_grads for one in memory("zb-h2", 3, 9, weight_grad_transient_bytes=9000))


def test_a_transient_beyond_all_else_is_where_the_peak_is():
    (first, _) = memory("gpipe", 2, 3, forward_transient_bytes=10**6)
    assert first.transients == 10**6
    assert first.gradients == 0  # nothing was backward yet


def test_gradients_are_there_until_the_update():
    program = add_updates(schedules.get("gpipe").program(1, 2))
    costs = Costs.uniform(1, gradient_bytes=7, backward_transient_bytes=2, update_transient_bytes=5)
    (found,) = rank_memory(program, costs)
    assert (found.gradients, found.transients) == (7, 5)


def test_outputs_wait_until_something_comes_back_that_was_made_after_they_were_taken():
    costs = Costs.uniform(2, output_bytes=10, forward_transient_bytes=1)
    assert [one.messages for one in rank_memory(schedules.get("gpipe").program(2, 5), costs)] == [40, 40]
    assert [one.messages for one in rank_memory(schedules.get("1f1b").program(2, 5), costs)] == [10, 10]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_beside_copies_to_the_host_at_most_one_message_more_waits(name):
    """A copy may stand between the action that makes an output and the one before which a reply is there."""
    program, costs = schedules.get(name).program(4, 8), Costs.uniform(4, output_bytes=10, activation_bytes=1)
    before, after = rank_memory(program, costs), rank_memory(add_offloading(program, {0, 1, 2}), costs)
    assert all(one.messages <= other.messages <= one.messages + 10 for one, other in zip(before, after, strict=True))


def test_a_value_between_two_stages_of_a_rank_is_held_until_it_is_used():
    program = Program.parse("microbatches 2\nplacement 0 0\nrank 0: 0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1")
    assert rank_memory(program, Costs.uniform(2, output_bytes=10))[0].messages == 10


def test_gradients_are_made_once_whichever_backwards_make_them():
    costs = Costs.uniform(1, gradient_bytes=7, deferred_gradient_bytes=4, update_transient_bytes=100)
    for order in ("0F0 0F1 0B0 0I1 0W1", "0F0 0F1 0I0 0B1 0W0", "0F0 0F1 0I0 0W0 0B1"):
        (found,) = rank_memory(Program.parse(f"microbatches 2\nrank 0: {order} 0UPDATE0"), costs)
        assert found.gradients == 7  # when it updates


def test_an_output_that_is_kept_anyway_does_not_count_twice_while_it_waits():
    sizes = {"activation_bytes": 50, "output_bytes": 10, "kept_output_bytes": 10}
    program = schedules.get("gpipe").program(2, 5)
    assert rank_memory(program, Costs.uniform(2, **sizes))[0].messages == 0
    assert rank_memory(add_recompute(program, "always"), Costs.uniform(2, **sizes))[0].messages == 50


def test_a_forward_that_keeps_but_its_input_needs_what_its_largest_layer_does():
    program = add_recompute(schedules.get("gpipe").program(1, 3), "always")
    costs = Costs.uniform(1, activation_bytes=100, input_bytes=10, dropping_transient_bytes=150)
    assert rank_memory(program, costs)[0].transients == 150


def test_a_layer_that_works_in_place_needs_no_transient_memory():
    """As a layer that works in place."""
    assert dropping_bytes([LayerMemory(input_bytes=20, activation_bytes=0, forward_transient_bytes=0)]) == 0


def test_asynchronous_schedules_stash_weights():
    stashed = [one.stashed for one in memory("pipedream", 3, 6)]
    assert stashed == [2000, 1000, 0]


def test_a_lowered_program_needs_what_the_plain_one_does():
    program = schedules.get("zb-v").program(3, 6)
    costs = Costs.uniform(program.num_stages, **SIZES)
    assert rank_memory(lower(program), costs) == rank_memory(program, costs)


@pytest.mark.parametrize("name", schedules.names())
def test_it_is_no_less_than_what_the_trace_holds(name):
    program = schedules.get(name).program(4, 8)
    costs = Costs.uniform(program.num_stages, **SIZES)
    held = simulate(program, costs).peak_bytes
    for rank, (own, activations) in enumerate(zip(rank_memory(program, costs), held, strict=True)):
        chunks = program.placement.count(rank)
        assert activations + 3030 * chunks <= own.total_bytes <= activations + (3030 + 2 * 900) * chunks + 200


def test_costs_are_of_as_many_stages():
    with pytest.raises(ScheduleError, match="the program has 2 stages, but the costs have 3"):
        rank_memory(schedules.get("gpipe").program(2, 2), Costs.uniform(3))
