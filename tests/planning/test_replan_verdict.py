"""What replan decides: by times that are given, not measured, so that every decision is the same on every machine."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from pipesched import Costs, Pipeline, simulate
from pipesched.planning.cost_correction import Known, MeasuredStage
from pipesched.planning.plan import Plan
from pipesched.planning.replan_verdict import Replanned, strayed, verdict
from pipesched.simulation.layer_costs import TIMES, LayerCosts
from pipesched.simulation.layer_memory import LayerMemory

X, Y = torch.zeros(8, 3), torch.zeros(8, 3)
EQUAL = dict.fromkeys("01234567", 1e-3)


def layer(forward_s: float, backward_s: float | None = None) -> LayerCosts:
    back = 2 * forward_s if backward_s is None else backward_s
    memory = LayerMemory(input_bytes=12, output_bytes=12, activation_bytes=12, weight_grad_bytes=24)
    times = dict(zip(TIMES, (forward_s, back, back / 2, back / 2), strict=True))
    return LayerCosts(**times, parameter_bytes=48, memory=memory)


def pipeline(**options: Any) -> Pipeline:
    """Of eight equal layers, whose times are said to be known."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(8)))
    choices = {"devices": ["cpu"] * 2, "boundaries": [4], "num_microbatches": 8, "schedule": "1f1b", **options}
    pipe = Pipeline(model, X[:1], loss_fn=functional.mse_loss, **choices)
    pipe._cost_model.layers = {name: layer(seconds) for name, seconds in EQUAL.items()}
    return pipe


def ran(
    pipe: Pipeline,
    seconds: Mapping[str, float],
    slow: Mapping[int, float] | None = None,
    steps: Sequence[float] = (1, 1, 1),
) -> None:
    """As if steps had run in which layers took so long. steps: how many times as long each took."""
    pipe._running.runs.clear()
    program = pipe._running.assembly.program
    own = [
        (slow or {}).get(program.placement[stage], 1.0)
        * sum(seconds[name] for name in pipe._running.assembly.cut[part])
        for stage, part in enumerate(program.weights)
    ]
    for times in steps:
        there = tuple(times * one for one in own)
        trace = simulate(pipe._running.assembly.programs.full.without_messages, Costs(there, there, there))
        pipe._running.runs.append(SimpleNamespace(spans=lambda trace=trace: iter(trace.spans)))


def test_a_layer_that_has_grown_is_given_room() -> None:
    with pipeline() as pipe:
        pipe._cost_model.layers["7"] = layer(1.001e-3)  # of another kind than the others
        ran(pipe, {**EQUAL, "7": 4e-3})
        done = pipe.replan()
        assert done.moved
        assert pipe.boundaries == ["6"]
        assert done.layers == {"4": (1, 0), "5": (1, 0)}
        assert [round(seconds, 6) for seconds in (done.before_s, done.after_s)] == [0.18, 0.156]
        assert str(done).startswith(
            "moved: 2 layers, 0 B; predicted 180 ms -> 156 ms per step (-13.3%, noise 0.0%); moving took "
        )
        ran(pipe, {**EQUAL, "7": 4e-3})
        again = pipe.replan()
        assert str(again) == "kept: no better plan was found; predicted 156 ms -> 156 ms per step (-0.0%, noise 0.0%)"
        assert pipe.step(X, target=Y).isfinite()


@pytest.mark.parametrize(
    ("last", "steps", "left", "kept"),
    [
        (1.1e-3, (1, 1, 1), None, "no better plan was found"),
        (4e-3, (1, 0.9, 1.2, 1.1, 0.8), None, "the saving is below 30.0% of a step"),
        (4e-3, (1, 1, 1), 0, "the saving over the remaining 0 steps is 0 s, less than the time needed to move layers"),
        (
            4e-3,
            (1, 1),
            None,
            "the search for a better plan requires 3 measured steps of the current plan; measured so far: 2",
        ),
        (4e-3, (1, 1.01, 0.99), 10_000, ""),
    ],
)
def test_a_plan_is_kept_where_another_one_is_not_worth_it(
    last: float, steps: Sequence[float], left: int | None, kept: str
) -> None:
    with pipeline() as pipe:
        pipe._cost_model.layers["7"] = layer(1.001e-3)
        ran(pipe, {**EQUAL, "7": last}, steps=steps)
        before = pipe._running.assembly
        done = pipe.replan(steps_left=left)
        assert (done.kept, done.moved, pipe._running.assembly is before) == (kept, not kept, bool(kept))
        assert done.plan.stages == pipe.plan.stages
        assert str(done).startswith(f"kept: {kept}" if kept else "moved: ")


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b"])
def test_a_slow_device_gets_fewer_layers_until_it_has_recovered(schedule: str) -> None:
    even = {"num_stages": 4, "boundaries": [2, 4, 6]} if schedule == "interleaved-1f1b" else {}
    with pipeline(schedule=schedule, devices=["cpu:0", "cpu:1"], **even) as pipe:
        for slow, number in ((1.5, 3), (1, 4)):
            ran(pipe, EQUAL, slow={1: slow})
            done = pipe.replan()
            assert done.moved
            assert pipe._cost_model.slow.get(torch.device("cpu:1"), 1) == pytest.approx(slow)
            placed = zip(pipe._running.assembly.cut, pipe._running.assembly.program.placement, strict=True)
            assert sum(len(names) for names, rank in placed if rank) == number
            ran(pipe, EQUAL, slow={1: slow})
            assert pipe.predicted.makespan_s == pytest.approx(done.after_s)
            assert pipe.step(X, target=Y).isfinite()


def test_replan_keeps_pins_and_may_change_boundaries() -> None:
    grown = {**EQUAL, "0": 3e-3, "1": 3e-3}
    for boundaries, expected in (([4], ["2"]), ({"4": 1}, ["4"]), (None, ["2"])):
        with pipeline(boundaries=boundaries) as pipe:
            pipe._cost_model.layers |= {name: layer(1.001e-3) for name in "01"}
            pipe.replan(Plan([[*"0123"], [*"4567"]], "1f1b", pipe.plan.program))  # not the measured cut: times vary
            ran(pipe, grown)
            pipe.replan()
            assert pipe.boundaries == expected


def test_the_choice_is_the_same_each_time() -> None:
    found = []
    for _ in range(2):
        with pipeline(devices=["cpu"] * 4, boundaries=[2, 4, 6]) as pipe:
            ran(pipe, {name: 1e-3 * (1 + int(name) ** 2) for name in EQUAL}, steps=(1, 1.01, 0.98, 1.02))
            done = pipe.replan(steps_left=10**6)
            found.append((pipe.boundaries, done.layers, done.before_s, done.after_s, done.noise))
    assert found[0] == found[1]
    assert found[0][0] != ["2", "4", "6"]


# ---- what stages tell of layers ---------------------------------------------------------------------------------

times = st.floats(0.5, 2)


@settings(max_examples=200)
@given(st.data())
def test_corrected_layers_take_what_their_stages_took(data: st.DataObject) -> None:
    """Whatever is put down to devices, to layers of one stage, or to all of a stage's layers."""
    kinds = data.draw(st.lists(st.integers(0, 3), min_size=4, max_size=12))
    names = [str(index) for index in range(len(kinds))]
    of_kind = {kind: layer(data.draw(times), data.draw(times)) for kind in {*kinds}}
    slow = data.draw(st.dictionaries(st.integers(0, 2), st.floats(1.5, 4)))
    known = Known(
        {name: of_kind[kind] for name, kind in zip(names, kinds, strict=True)},
        dict(zip(names, kinds, strict=True)),
        slow,
    )
    cuts = sorted({0, len(kinds), *data.draw(st.lists(st.integers(1, len(kinds) - 1), max_size=3))})
    stages = [
        MeasuredStage(names[begin:end], stage % 3, *(data.draw(times) for _ in TIMES))
        for stage, (begin, end) in enumerate(pairwise(cuts))
    ]
    found = known.corrected(stages, tolerance=0.05)
    for stage in stages:
        for time in TIMES:
            took = sum(getattr(found.layers[name], time) for name in stage.layers) * found.slowness(stage.device)
            assert took == pytest.approx(getattr(stage, time))
    assert min(found.slowness(stage.device) for stage in stages) == pytest.approx(1)


def took(layers: str, device: int, forward_s: float) -> MeasuredStage:
    return MeasuredStage(layers, device, forward_s, 2 * forward_s, forward_s, forward_s)


def test_equal_layers_on_other_devices_show_whether_a_device_or_a_layer_is_slow() -> None:
    equal = Known({name: layer(1) for name in "abcdefgh"}, dict.fromkeys("abcdefgh", 0))
    assert equal.corrected([took("abcd", 0, 6), took("efgh", 1, 6)], 0.05).slow == {}  # all have grown
    assert equal.corrected([took("abcd", 0, 4), took("efgh", 1, 7)], 0.05).slow == {1: 1.75}
    one = equal.corrected([took("abcd", 0, 4), took("efgh", 0, 6)], 0.05)  # a device that is as fast here as there
    assert (one.slow, one.layers["a"].forward_s, one.layers["e"].forward_s) == ({}, 1, 1.5)
    head = Known(equal.layers, {**equal.kinds, "h": 1})
    found = head.corrected([took("abcd", 0, 8), took("efgh", 1, 10)], 0.05)
    assert found.slow == {}
    assert [found.layers[name].forward_s for name in "aegh"] == [2, 2, 2, pytest.approx(4)]
    within = head.corrected([took("abcd", 0, 4), took("efgh", 1, 4.1)], 0.05)
    assert [within.layers[name].forward_s for name in "aeh"] == [1, pytest.approx(1.025), pytest.approx(1.025)]


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.5), st.floats(0, 1), st.integers(0, 100))
def test_a_plan_that_is_moved_to_saves_what_it_must(
    before_s: float, after_s: float, noise: float, cost_s: float, left: int
) -> None:
    saving = before_s - after_s
    worth = saving > 0 and saving > before_s * max(0.03, 2 * noise)
    assert (verdict(before_s, after_s, noise=noise, cost_s=cost_s, steps_left=None) == "") == worth
    assert (verdict(before_s, after_s, noise=noise, cost_s=cost_s, steps_left=left) == "") == (
        worth and saving * left > cost_s
    )


def test_noise_is_that_of_the_rank_that_strays_most() -> None:
    """Of the work of its actions, each beside others of its kind: a short batch is no noise."""

    def step(microbatches: int, *forward_s: float) -> Any:
        with pipeline(num_microbatches=microbatches) as pipe:
            return simulate(pipe._running.assembly.program, Costs(forward_s, (1.0, 1.0), (1.0, 1.0)))

    assert strayed([]) == 0
    assert strayed([step(8, 1, 1), step(3, 1, 1), step(8, 1, 1)]) == 0
    assert strayed([step(8, 1, 1), step(8, 1, 2.5), step(8, 1, 4)]) == pytest.approx(1.5 / 4.5)


def test_what_is_printed_names_both_steps_and_the_cost() -> None:
    with pipeline() as pipe:
        plan = pipe.plan
    moved = Replanned(plan, "", {"a": (0, 1), "b": (0, 1)}, 12_897_485, 0.0412, 0.0379, 0.004, 0.2)
    assert str(moved) == (
        "moved: 2 layers, 12.3 MiB; predicted 41.2 ms -> 37.9 ms per step (-8.0%, noise 0.4%); "
        "moving took 200 ms, regained after 61 steps"
    )
    kept = Replanned(plan, "the saving is below 3.0% of a step", {"a": (0, 1)}, 5_120, 0.1, 0.098, 0.01, 0.2)
    assert str(kept) == (
        "kept: the saving is below 3.0% of a step; predicted 100 ms -> 98 ms per step (-2.0%, noise 1.0%); "
        "moving 1 layer, 5 KiB would take 200 ms, regained after 100 steps"
    )
