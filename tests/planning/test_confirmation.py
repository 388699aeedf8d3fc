"""Confirmation without a model: plans "run" in a simulation with other costs than the profile tells."""

import re
from dataclasses import replace
from operator import mul
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesched import simulate
from pipesched.planning.confirmation import _Tried, _usual_deviation, confirmed_plan, settled
from pipesched.planning.evaluated_candidate import WORTH
from pipesched.planning.pins import Pins
from pipesched.planning.plan import Plan
from pipesched.planning.profile_correction import corrected
from pipesched.planning.report.report import Report
from pipesched.planning.search_request import SearchRequest
from pipesched.planning.tuner import Tuner, find_plan
from pipesched.program.checkpoint_options import checkpoint_by_layer
from pipesched.simulation.layer_costs import TIMES, costs_of
from pipesched.simulation.trace import Spans
from tests.support.synthetic_profiles import profile


def search(known, ranks=2, counts=(8,), **asked):
    return SearchRequest(known, Pins(list(known.layers)), ranks, max(counts), counts, effort=100_000, **asked)


class Machine:
    """Runs plans as long as layers of the true profile take. factors: of each step in turn, over and over."""

    def __init__(self, truth, batch_size=8, factors=(1.0,)):
        self.truth, self.batch_size, self.factors = truth, batch_size, factors
        self.ran = []

    def __call__(self, plans, told):
        self.ran.append([(plan.schedule, plan.stages, plan.program.num_microbatches) for plan in plans])
        told(1.0)
        return [[self.step(plan, factor) for factor in self.factors] for plan in plans]

    def step(self, plan, factor=1.0):
        rows = self.batch_size // plan.program.num_microbatches
        costs = self.truth.costs(plan.stages, rows, keep=checkpoint_by_layer(plan.checkpoint))
        slow = factor if isinstance(factor, tuple) else (factor,) * plan.program.num_ranks  # of each rank
        slower = [slow[rank] for rank in plan.program.placement]
        times = {time: tuple(map(mul, slower, getattr(costs, time))) for time in TIMES}
        return simulate(plan.completed, replace(costs, **times))


def lying(truth, heavy=6, **layers):
    """The profile and the true one: a layer takes five times as long as is told."""
    times = [1.0] * truth
    told, times[heavy] = [*times], 5.0
    told[heavy] = 1.01  # it was measured by itself
    return profile(told, **layers), profile(times, **layers)


def test_confirmation_corrects_a_wrong_profile():
    """The plan of the profile is slow, that of the corrected one is not, and its predicted step is right."""
    lie, known = lying(8)
    machine = Machine(known)
    misled, best = find_plan(search(lie)), find_plan(search(known))
    plan = confirmed_plan(search(lie), machine, 3)
    took = [machine.step(each).makespan_s for each in (misled, plan, best)]
    assert took[0] > 1.2 * took[2]
    assert took[1] == pytest.approx(took[2], rel=0.02)
    assert plan.predicted().makespan_s == pytest.approx(took[1], rel=0.02)
    assert [len(plans) for plans in machine.ran] == [3, 2]  # the second time beside the fastest of the first


class Slow(Machine):
    """Takes so long that only the first plan of each call runs."""

    def __call__(self, plans, told):
        first, *others = super().__call__(plans, told)
        return [first, *([] for _ in others)]


def test_if_only_one_plan_runs_its_correction_finds_the_next():
    lie, known = lying(8)
    machine = Machine(known)
    plan = confirmed_plan(search(lie), Slow(known), 3)
    misled_s, took_s = (machine.step(each).makespan_s for each in (find_plan(search(lie)), plan))
    assert took_s == pytest.approx(machine.step(find_plan(search(known))).makespan_s, rel=0.02)
    measured = [other.measured_s for other in plan.alternatives if other.measured_s]
    assert measured == [pytest.approx(took_s), pytest.approx(misled_s)]


def test_the_last_correction_only_predicts_again(monkeypatch):
    searches = []
    search_once = Tuner.search
    monkeypatch.setattr(Tuner, "search", lambda *given: searches.append(1) or search_once(*given))
    lie, known = lying(8)
    machine = Machine(known)
    plan = confirmed_plan(search(lie), machine, 3)
    assert len(machine.ran) == len(searches) == 2
    assert len(plan.alternatives) > 5


@pytest.mark.parametrize(
    ("factors", "slower", "decided"),
    [
        ((1.0, 1.001, 0.999, 1.0), 1.0, True),  # equally fast, with less noise than matters
        ((1.0, 1.1, 0.9, 1.0, 1.1, 0.9), 1.0, False),
        ((1.0, 1.1, 0.9, 1.0, 1.1, 0.9), 1.05, False),
        ((1.0, 1.1, 0.9, 1.0, 1.1, 0.9), 1.5, True),
    ],
)
def test_trials_are_settled_if_noise_no_longer_matters(factors, slower, decided):
    plan = find_plan(search(profile([1.0] * 4)))
    machine = Machine(profile([1.0] * 4))
    fast = [machine.step(plan, factor) for factor in factors]
    slow = [machine.step(plan, factor * slower) for factor in factors]
    assert settled([fast, [], slow]) is decided


@pytest.mark.parametrize("heavy", [0, 3, 7])
def test_corrected_costs_are_the_true_ones(heavy):
    """Of layers that differ from all others, and in all sizes of micro-batches."""
    lie, known = lying(8, heavy, sizes=(1, 2))
    tuner, machine = Tuner(search(lie)), Machine(known)
    found = tuner.search()
    new = corrected(lie, [(found, [machine.step(tuner.plan(found))])], 8)
    assert new.layers == lie.layers
    for rows in (1, 2):
        for name in lie.layers:
            own, true = (costs_of(each.graph(rows), name) for each in (new, known))
            assert [getattr(own, time) for time in TIMES] == pytest.approx([getattr(true, time) for time in TIMES])
            assert own.memory == true.memory


def corrections(known, told, ranks_of_steps):
    """The factors by which the times of layers are corrected, if in each step the two ranks are so much slower."""
    tuner, machine = Tuner(search(told)), Machine(known)
    found = tuner.search()
    plan = tuner.plan(found)
    new = corrected(told, [(found, [machine.step(plan, factors) for factors in ranks_of_steps])], 8)
    return [costs_of(new.graph(1), name).forward_s / costs_of(told.graph(1), name).forward_s for name in told.layers]


def test_differences_between_stages_that_noise_explains_are_not_corrected():
    known = profile([1.0, 2.0, 1.0, 3.0, 1.0, 1.0, 2.0])
    factors = corrections(known, known, [(1.5, 1.2), (1.2, 1.5), (1.5, 1.25), (1.2, 1.5)])
    assert factors == pytest.approx([factors[0]] * 7)  # all stages are slower, which is no noise
    assert factors[0] == pytest.approx(1.35, rel=0.05)


def test_differences_that_noise_does_not_explain_are_corrected_nearly_as_far_as_they_go():
    lie, known = lying(8)
    noisy = corrections(known, lie, [(1.1, 1.0), (1.0, 1.1)] * 4)
    assert noisy == pytest.approx([1.05] * 6 + [5.2] + [1.05], rel=0.1)


def test_the_same_difference_in_all_steps_is_corrected_as_a_whole():
    known = profile([1.0] * 8)
    assert sorted(corrections(known, known, [(1.4, 1.0)] * 3)) == pytest.approx([1.0] * 4 + [1.4] * 4)


@settings(max_examples=5)
@given(st.lists(st.integers(1, 9), min_size=4, max_size=8), st.sampled_from([1.0, 1.3, 3.0]))
def test_a_profile_that_is_right_stays_so_and_one_of_another_machine_is_scaled(times, slower):
    told, known = (profile([factor * time for time in times]) for factor in (1.0, slower))
    plan, machine = find_plan(search(told)), Machine(known)
    own = confirmed_plan(search(told), machine, 3)
    assert own.predicted().makespan_s == pytest.approx(slower * plan.predicted().makespan_s, rel=0.02)
    assert own.alternatives[0].measured_s == pytest.approx(own.predicted().makespan_s)
    if len(machine.ran) > 1:  # the second search starts from the results of the first, and can find a better plan
        assert own.predicted().makespan_s < slower * plan.predicted().makespan_s * (1 - WORTH)
    elif slower == 1:
        assert (own.stages, own.program) == (plan.stages, plan.program)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("limit_bytes", [5500, 6500])
@pytest.mark.parametrize("checkpoint", [None, "always", "except_last"])
def test_where_layers_are_recomputed_they_cost_what_they_did(checkpoint, limit_bytes):
    """What is recomputed is no part of a layer's own forward and backward."""
    lie, known = lying(8)
    machine = Machine(known)
    asked = {"memory_limit_bytes": (limit_bytes,) * 2, "checkpoint": checkpoint}
    plan = confirmed_plan(search(lie, **asked), machine, 3)
    assert plan.predicted().makespan_s == pytest.approx(machine.step(plan).makespan_s, rel=0.02)
    assert max(need.total_bytes for need in plan.memory()) <= limit_bytes
    assert all(other.fits for other in plan.alternatives if other.measured_s is not None)


def test_plans_that_run_differ_in_schedule_stages_or_microbatches():
    known = profile([1.0] * 8, (1, 2, 4))
    machine = Machine(known, batch_size=16)
    confirmed_plan(search(known, 3, (4, 8, 16)), machine, 5)
    (ran,) = machine.ran
    assert len(ran) == 5
    assert len({(schedule, len(stages), count) for schedule, stages, count in ran}) == 5


def test_within_noise_the_prediction_decides():
    """The steps of the plans that run differ by less than they stray: what is taken is what a search takes."""
    known = profile([1.0, 2.0, 1.0, 3.0, 1.0, 1.0, 2.0])
    plan = find_plan(search(known))
    noisy = confirmed_plan(search(known), Machine(known, factors=(0.5, 0.9, 1.1, 1.5)), 3)
    assert (noisy.stages, noisy.program) == (plan.stages, plan.program)
    assert "measured equally fast, within noise" in {other.note for other in noisy.alternatives[1:3]}


class Full(Machine):
    """Has no room for plans of some number of ranks, which have no steps then."""

    def __call__(self, plans, told):
        steps = super().__call__(plans, told)
        return [own if plan.program.num_ranks == 1 else [] for plan, own in zip(plans, steps, strict=True)]


def test_a_plan_without_room_is_not_taken():
    known = profile([1.0] * 4)
    plan = confirmed_plan(search(known), Full(known), 20)
    assert plan.program.num_ranks == 1
    assert {other.num_ranks for other in plan.alternatives if other.measured_s} == {1}


class Crowded(Machine):
    """Where ranks run at once they hold each other up between their actions, of which costs know nothing."""

    def step(self, plan, factor=1.0):
        trace = super().step(plan, factor)
        pause_s = 10.0 * (plan.program.num_ranks - 1)
        spans = [
            span._replace(start_s=span.start_s + pause_s * at, end_s=span.end_s + pause_s * at)
            for at, span in enumerate(sorted(trace.spans, key=lambda span: span.start_s))
        ]
        return replace(trace, spans=Spans.of(tuple(spans)))


def test_a_slowdown_that_no_cost_explains_is_found_by_running():
    """No stage takes longer than predicted, and yet every plan of two ranks does: one rank is taken."""
    known = profile([1.0] * 4)
    assert find_plan(search(known)).program.num_ranks == 2
    plan = confirmed_plan(search(known), Crowded(known), 20)
    assert plan.program.num_ranks == 1
    notes = {other.num_ranks: other.note for other in plan.alternatives if other.measured_s and other.note}
    assert re.fullmatch(r"measured [\d.]+x slower", notes[2])
    assert any(re.fullmatch(r"predicted [\d.]+x faster, but it was not run", other.note) for other in plan.alternatives)


def test_measured_steps_are_shown_and_saved(tmp_path):
    lie, known = lying(8)
    plan = confirmed_plan(search(lie), Machine(known), 3)
    own, *others = plan.alternatives
    assert own.note == ""
    assert own.measured_s == pytest.approx(own.step_s, rel=0.02)
    ran = [other for other in others if other.measured_s is not None]
    assert len(ran) >= 2
    assert all(other.note.startswith("measured ") for other in ran)
    assert any(other.first_s < 0.9 * other.measured_s for other in ran)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").alternatives == plan.alternatives
    report = Report(Plan.load(tmp_path / "plan.json"))
    said = next(line for line in report.lines if line.startswith("confirmed: "))
    assert f"in trial runs of {len(ran) + 1} plans this plan took" in said
    for shown in (report.text(), report.html()):
        assert said in shown
        assert "measured" in shown


def test_baselines_that_ran_say_what_they_took():
    known = profile([1.0] * 4)
    plan = confirmed_plan(search(known), Crowded(known), 20)
    (alone,) = [other for other in plan.alternatives if other.label == "one device"]
    assert alone.measured_s == plan.alternatives[0].measured_s
    split = [other for other in plan.alternatives if other.label == "equal split" and other.measured_s is not None]
    assert split
    assert any(line.endswith("an equal split (" + line.split("(")[1]) for line in Report(plan).lines if "equal" in line)


def test_progress_only_goes_on():
    lie, known = lying(8)
    told = []
    confirmed_plan(search(lie), Machine(known), 2, told.append)
    assert told == sorted(told)
    assert told[-1] == 1


def test_a_layer_without_times_keeps_none():
    times = [1.0, 0.0, 1.0, 1.0]
    plan = confirmed_plan(search(profile(times)), Machine(profile([2 * time for time in times])), 2)
    assert plan.predicted().makespan_s == pytest.approx(plan.alternatives[0].measured_s)


def test_corrections_scale_waiting_and_crowded_times_too():
    known = profile([1.0] * 4)
    for _, node in known.graphs[1].nodes(data=True):
        node["waiting_s"], node["crowded_s"] = 1.5, 0.3
    tuner = Tuner(search(known))
    found = tuner.search()
    new = corrected(known, [(found, [Machine(profile([2.0] * 4)).step(tuner.plan(found))])], 8)
    assert costs_of(new.graph(1), "layer0").waiting_s == pytest.approx(3.0)
    assert costs_of(new.graph(1), "layer0").crowded_s == pytest.approx(0.6)


def ran(*steps_s):
    steps = [SimpleNamespace(makespan_s=step_s) for step_s in steps_s]
    return _Tried(steps, SimpleNamespace(step_s=1.0), first_s=1.0)


def test_steps_that_are_equal_by_chance_have_the_noise_of_other_plans():
    chance, slow, other = ran(1.0, 1.0), ran(1.05, 1.05, 1.05), ran(0.9, 1.1, 0.9, 1.1)
    assert slow.is_slower(chance, _usual_deviation([slow, chance]))
    assert not slow.is_slower(chance, _usual_deviation([slow, chance, other]))


def test_steps_that_vary_keep_their_noise_beside_steady_plans():
    steady, noisy = ran(1.0, 1.0), ran(0.9, 1.1)
    assert noisy.noise(_usual_deviation([steady] * 9 + [noisy])) == noisy.noise(0.0) > 0.1


def test_the_expected_step_is_closer_to_a_measurement_with_less_noise():
    def expected_s(*steps_s):
        tried = ran(*steps_s)
        return tried.expected_s(_usual_deviation([tried]))

    assert expected_s(1.1, 1.1, 1.1) == pytest.approx(1.1)
    assert 1 < expected_s(0.9, 1.1, 1.3) < 1.01 < expected_s(1.08, 1.1, 1.12) < 1.1
