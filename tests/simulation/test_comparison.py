"""Measured traces as costs: the medians of what the actions took, sizes from the profile."""

from pipesched import Action, Costs, Kind, Span, Trace
from pipesched.simulation.comparison import measured_costs


def trace(*spans):
    actions = [(Action(stage, kind, microbatch), seconds) for stage, kind, microbatch, seconds in spans]
    return Trace(tuple(Span(action, 0, 0.0, seconds, action.lane) for action, seconds in actions), 1)


def test_measured_costs_are_the_medians_of_what_the_actions_took():
    one = trace((0, Kind.F, 0, 1.0), (0, Kind.F, 1, 2.0), (0, Kind.B, 0, 5.0), (1, Kind.F, 0, 7.0))
    two = trace(
        (0, Kind.F, 0, 100.0), (0, Kind.B, 0, 7.0), (1, Kind.I, 0, 3.0), (1, Kind.W, 0, 4.0), (0, Kind.R, 0, 1.5)
    )
    found = measured_costs([one, two], 2)
    assert found.forward_s == (2.0, 7.0)
    assert found.backward_s == (6.0, 7.0)  # stage 1 ran in parts
    assert found.input_grad_s == (6.0, 3.0)  # stage 0 ran whole
    assert found.weight_grad_s == (0.0, 4.0)
    assert found.recompute_s == (1.5, 0.0)
    assert found.activation_bytes == (0, 0)


def test_sizes_of_measured_costs_and_the_parts_of_a_backward_come_from_the_profile():
    profiled = Costs((1, 1), (1, 1), (1, 3), activation_bytes=(3, 4), input_bytes=(5, 6), weight_grad_bytes=(7, 8))
    found = measured_costs([trace((0, Kind.F, 0, 2.0), (1, Kind.B, 0, 8.0))], 2, profiled)
    assert found.forward_s == (2.0, 0.0)
    assert (found.input_grad_s[1], found.weight_grad_s[1]) == (2.0, 6.0)
    assert (found.activation_bytes, found.input_bytes, found.weight_grad_bytes) == ((3, 4), (5, 6), (7, 8))
