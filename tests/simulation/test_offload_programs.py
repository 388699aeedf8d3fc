"""Copies of activations to the host, in programs: where they stand, what they need, their time, what they free."""

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesched import Costs, Kind, Program, lower, schedules, simulate, validate
from pipesched.errors import ExecutionError, ScheduleError
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.program_factory import ProgramFactory
from pipesched.program.checkpoint_options import offloading
from pipesched.program.lowering import add_offloading, add_recompute
from pipesched.runtime.stage.offloading import host_bytes_per_s
from pipesched.simulation.layer_costs import LayerCosts, stage_costs
from pipesched.simulation.layer_memory import LayerMemory
from pipesched.simulation.memory import rank_memory
from pipesched.simulation.overheads import Machine
from pipesched.simulation.profile import Profile
from pipesched.testing import run_fake
from tests.support.models import synchronous_names

COPIES = (Kind.OFFLOAD, Kind.FREE, Kind.FETCH)


def offloaded(name: str, num_ranks: int, num_microbatches: int, ahead: int = 1) -> Program:
    program = schedules.get(name).program(num_ranks, num_microbatches)
    return add_offloading(program, set(range(program.num_stages)), ahead=ahead)


def test_copies_stand_next_to_the_computation_that_hides_them() -> None:
    program = add_offloading(schedules.get("gpipe").program(1, 4), {0})
    assert str(program).splitlines()[-1] == (
        "rank 0: 0F0 0OFFLOAD0 0F1 0FREE0 0OFFLOAD1 0F2 0FREE1 0FETCH0 0F3 0FETCH1 0B0 0B1 0B2 0B3".replace(
            "0F2 0FREE1", "0F2 0FREE1 0OFFLOAD2"
        ).replace("0F3 0FETCH1 0B0 0B1", "0F3 0FREE2 0OFFLOAD3 0FETCH1 0B0 0FREE3 0FETCH2 0B1 0FETCH3")
    )
    assert Program.parse(str(program)) == program


@given(
    name=st.sampled_from(synchronous_names()),
    num_ranks=st.sampled_from([2, 4]),
    num_microbatches=st.integers(1, 9),
    ahead=st.integers(1, 2),
)
@settings(max_examples=40)
def test_any_schedule_with_copies_is_valid_and_as_fast_where_the_link_is_fast(
    name: str, num_ranks: int, num_microbatches: int, ahead: int
) -> None:
    if name in ("chimera", "dualpipe"):
        num_microbatches = 2 * num_ranks
    plain = schedules.get(name).program(num_ranks, num_microbatches)
    program = offloaded(name, num_ranks, num_microbatches, ahead)
    validate(program)
    validate(lower(program))
    fast = Costs.uniform(program.num_stages, offload_s=1, fetch_s=1, activation_bytes=10, offload_bytes=10)
    assert simulate(program, fast).makespan_s == simulate(plain, fast).makespan_s
    slow = Costs.uniform(program.num_stages, offload_s=3, fetch_s=4)
    for costs in (fast, slow):
        assert simulate(lower(program), costs).makespan_s == simulate(program, costs).makespan_s
        if costs is fast or not program.columns.joined.any():  # where both wait for what either needs
            assert run_fake(program, costs).makespan_s == simulate(program, costs).makespan_s
    peaks = simulate(program, fast).peak_bytes, simulate(plain, fast).peak_bytes
    assert all(one <= other for one, other in zip(*peaks, strict=True))
    held = [memory.activations for memory in rank_memory(lower(program), fast)]
    assert all(one <= other for one, other in zip(peaks[0], held, strict=True))


def test_three_microbatches_at_most_are_on_the_device() -> None:
    """One leaves, one is made or used, and one comes back."""
    costs = Costs.uniform(8, activation_bytes=1, offload_bytes=1, offload_s=1, fetch_s=1)
    for name, expected in (("gpipe", [3] * 8), ("1f1b", [3] * 6 + [2, 1])):
        program = offloaded(name, 8, 16)
        assert [memory.activations for memory in rank_memory(program, costs)] == expected
        assert list(simulate(program, costs).peak_bytes) == expected


def test_a_slow_link_makes_the_rank_wait_and_its_copies_follow_each_other() -> None:
    program = offloaded("gpipe", 1, 4)
    trace = simulate(program, Costs.uniform(1, offload_s=3, fetch_s=2))
    ends = {str(span.action): (span.start_s, span.end_s) for span in trace.spans}
    assert ends["0OFFLOAD0"] == (1, 4)
    assert ends["0F1"] == (1, 2)
    assert ends["0FREE0"] == (4, 4)
    assert ends["0OFFLOAD1"] == (4, 7)
    assert ends["0F2"] == (4, 5)
    assert ends["0FREE1"] == (7, 7)
    assert ends["0FETCH0"] == (7, 9)
    assert trace.busy_s == (12,)


def test_activations_that_are_used_at_once_or_recomputed_are_not_offloaded() -> None:
    assert not offloaded("1f1b", 2, 8).index.has(*COPIES)
    program = schedules.get("gpipe").program(2, 4)
    again = add_recompute(program, "always")
    assert add_offloading(again, {0, 1}) == again
    assert add_offloading(program, set()) is program
    kinds = add_offloading(program, {1}).columns
    assert set(kinds.stage[kinds.are(*COPIES)].tolist()) == {1}


@pytest.mark.parametrize(
    ("order", "match"),
    [
        ("0F0 0OFFLOAD0 0F1 0FREE0 0B0 0B1", r"rank 0, position 1: .*0OFFLOAD0 has no 0FETCH0\. Add it\."),
        ("0F0 0OFFLOAD0 0F1 0FETCH0 0B0 0B1", r"0OFFLOAD0 has no 0FREE0\. Add it\."),
        ("0F0 0OFFLOAD0 0F1 0FREE0 0FETCH0 0R0 0B0 0B1", r"0OFFLOAD0 is also recomputed, by 0R0\. Remove one of them"),
        ("0F0 0F1 0FREE0 0FETCH0 0B0 0B1", r"0FREE0 needs 0OFFLOAD0, which no rank runs"),
        ("0OFFLOAD0 0F0 0F1 0FREE0 0FETCH0 0B0 0B1", r"0OFFLOAD0 needs 0F0 before it"),
        ("0F0 0OFFLOAD0 0F1 0FREE0 0B0 0FETCH0 0B1", r"0B0 needs 0FETCH0 before it"),
        ("0F0 0OFFLOAD0 0F1 0FETCH0 0FREE0 0B0 0B1", r"0FETCH0 needs 0FREE0 before it"),
    ],
)
def test_copies_that_do_not_fit_together_are_errors(order: str, match: str) -> None:
    program = Program.parse(f"name p\nmicrobatches 2\nplacement 0\nrank 0: {order}")
    with pytest.raises(ScheduleError, match=match):
        validate(program)
    if "FETCH0" not in order:
        with pytest.raises(ExecutionError, match=r"has not fetched the activations of micro-batch 0"):
            run_fake(program)


def test_only_tensors_that_no_neighbouring_layer_holds_are_offloaded() -> None:
    memory = LayerMemory(input_bytes=10, output_bytes=10, activation_bytes=50, kept_input_bytes=10, kept_output_bytes=5)
    layer = LayerCosts(forward_s=1, backward_s=2, input_grad_s=1, weight_grad_s=1, memory=memory)
    going = layer.treated("offload")
    costs = stage_costs([[layer], [going], [going, going], [going, layer, going]], host_bytes_per_s=5)
    assert costs.offload_bytes == (0, 35, 50 + 50 - 5 - 10 - 5, 70)
    assert costs.offload_s == costs.fetch_s == (0, 7, 16, 14)
    graph = nx.DiGraph([("a", "b")], parameters={})
    for name in graph:
        graph.nodes[name].update(layer.figures(), parameters=())
    profile = Profile({2: graph}, machine=Machine(host_bytes_per_s=7))
    assert Profile.from_dict(profile.to_dict()).machine == profile.machine
    assert profile.costs([["a"], ["b"]], 2, keep={"b": "offload"}).offload_s == (0, 5)
    assert offloading({"b": "offload", "a": "recompute"}, [["a"], ["b", "c"]]) == {1}
    assert offloading("always", [["a"]]) == frozenset()


def test_how_fast_a_device_copies_to_its_host() -> None:
    assert 1e7 < host_bytes_per_s(torch.device("cpu")) < 1e13
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        assert 1e8 < host_bytes_per_s(accelerator) < 1e12


def test_copies_go_with_the_last_cut_and_programs_are_made_again_only_where_it_differs() -> None:
    programs = ProgramFactory(PlanRequest(schedule="gpipe", num_microbatches=4, checkpoint={"a": "offload"}), 2)
    without = programs.of(4).without_messages
    programs.connect([(0, 1)], [["a"], ["b"]])
    copying = programs.of(4).without_messages
    assert copying == add_offloading(without, {0}) != without
    programs.connect([(0, 1)], [["a"], ["b"]])
    assert programs.of(4).without_messages is copying
    programs.connect([(0, 1)], [["b"], ["c"]])
    assert programs.of(4).without_messages == without
