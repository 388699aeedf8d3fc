import json
import math
from dataclasses import fields
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesched import Action, Costs, Kind
from pipesched.errors import PipeschedError, ScheduleError
from pipesched.program.actions import Holding
from pipesched.simulation.links import Link, Links
from pipesched.simulation.overheads import Overheads
from tests.support.random_programs import quick

NAMES = [field.name for field in fields(Costs)]
SCALARS = ["transfer_s", "overlap"]
BY_STAGE = [name for name in NAMES if name not in {*SCALARS, "links", "overheads", "other_s", "tensor"}]
TIMES = [name for name in NAMES if name.endswith("_s")]
SIZES = [name for name in NAMES if name.endswith("_bytes")]
WRONG = [math.nan, math.inf, -math.inf, -1, "1", None, 1j]


@st.composite
def any_costs(draw):
    num_stages = draw(st.integers(1, 4))
    seconds = st.integers(0, 9) | st.floats(0, 1e6)
    values = {
        name: draw(
            st.lists(seconds if name in TIMES else st.integers(0, 2**40), min_size=num_stages, max_size=num_stages)
        )
        for name in BY_STAGE
    }
    links = draw(st.none() | st.just(Links.of_hosts(2, num_stages, between=Link(1, 2), special={(0, 1): Link(3)})))
    overheads = draw(st.none() | st.builds(Overheads, seconds, link=st.just(Link(1, 2)), crowding=st.just((1, 1.5))))
    values["other_s"] = draw(st.sampled_from([{}, {"FREE": [2.5] * num_stages}]))
    return Costs(**values, transfer_s=draw(seconds), overlap=draw(st.floats(0, 1)), links=links, overheads=overheads)


@quick
@given(any_costs())
def test_from_dict_is_the_inverse_of_to_dict_also_through_json(costs):
    assert Costs.from_dict(costs.to_dict()) == costs
    assert Costs.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs


def test_the_names_carry_their_units():
    assert sorted([*TIMES, *SIZES, "overlap", "links", "overheads", "tensor"]) == sorted(NAMES)


def test_uniform_costs_one_second_an_action_unless_given():
    costs = Costs.uniform(3)
    assert costs == Costs((1, 1, 1), (1, 1, 1), (1, 1, 1), transfer_s=0)
    assert costs.num_stages == 3


def test_uniform_takes_one_number_for_each_name():
    costs = Costs.uniform(2, forward_s=2, recompute_s=3, transfer_s=0.5, activation_bytes=7)
    assert costs.forward_s == (2, 2)
    assert costs.recompute_s == (3, 3)
    assert costs.transfer_s == 0.5
    assert costs.activation_bytes == (7, 7)
    assert costs.input_bytes == (0, 0)


def test_a_backward_costs_both_its_halves_and_a_recompute_a_forward_unless_given():
    costs = Costs((1, 2), (3, 4), (5, 6))
    assert costs.backward_s == (8, 10)
    assert costs.recompute_s == (1, 2)
    assert Costs((1, 2), (3, 4), (5, 6), backward_s=(7, 9)).backward_s == (7, 9)


def test_seconds_are_those_of_the_kind_and_stage_and_none_for_transfers():
    costs = Costs((1, 10), (2, 20), (3, 30), (4, 40), (5, 50), transfer_s=9)
    texts = ["0F0", "1F0", "1I3", "1W0", "1B0", "1R0", "0SEND_F0>1", "1RECV_F0<0"]
    assert [costs.seconds(Action.parse(text)) for text in texts] == [1, 10, 20, 30, 40, 50, 0, 0]


def test_held_bytes_of_a_stage():
    costs = Costs.uniform(1, activation_bytes=5, input_bytes=2, weight_grad_bytes=3)
    assert costs.sizes() == {
        Holding.ACTIVATIONS: (5,),
        Holding.INPUT: (2,),
        Holding.OFFLOADED: (0,),
        Holding.WEIGHT_GRAD: (3,),
        Holding.WEIGHTS: (0,),
        Holding.GATHERED: (0,),
    }


def test_scaling_multiplies_times_and_leaves_sizes():
    costs = Costs((1, 2), (3, 4), (5, 6), (7, 8), (9, 10), 11, (12, 13))
    assert costs.scaled(2) == Costs((2, 4), (6, 8), (10, 12), (14, 16), (18, 20), 22, (12, 13))


def test_a_kind_without_a_field_of_its_own_has_its_time_in_other_s():
    costs = Costs.uniform(2, other_s={"FREE": 3})
    assert costs.times(Kind.FREE) == (3, 3)
    assert costs.seconds(Action(1, Kind.FREE, 5)) == 3
    assert costs.times(Kind.RESHARD) == ()
    assert costs.scaled(2).other_s == {"FREE": (6, 6)}
    assert "other_s" not in Costs.uniform(2).to_dict()
    assert hash(costs) == hash(Costs.uniform(2, other_s={"FREE": 3}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"F": (1, 1)}, "got {'F': .*use only the kinds FREE, RESHARD"),
        ((1, 1), "got .*use only the kinds FREE, RESHARD"),
        ({"FREE": 1}, "pass a list of times"),
        ({"FREE": (1,)}, "forward_s has 2, FREE has 1; make the numbers agree"),
        ({"FREE": (1, -1)}, "FREE of stage 1 is -1"),
    ],
)
def test_wrong_times_of_other_kinds_are_refused(given, message):
    with pytest.raises(PipeschedError, match=message):
        Costs((1, 1), (1, 1), (1, 1), other_s=given)


def test_fractions_stay_exact():
    third = Costs.uniform(1, input_grad_s=Fraction(1, 3), weight_grad_s=Fraction(2, 3))
    assert third.backward_s == (1,)


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("name", BY_STAGE)
def test_a_cost_is_finite_and_not_negative(name, value):
    given = {"forward_s": [1, 1], "input_grad_s": [1, 1], "weight_grad_s": [1, 1]} | {name: [1, value]}
    with pytest.raises(ScheduleError, match=f"{name} of stage 1 is {value!r}".replace("(", r"\(").replace(")", r"\)")):
        Costs(**given)


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("name", SCALARS)
def test_a_number_for_all_stages_is_finite_and_not_negative(name, value):
    with pytest.raises(ScheduleError, match=f"{name} is"):
        Costs.uniform(2, **{name: value})


@pytest.mark.parametrize("name", [name for name in BY_STAGE if name != "forward_s"])
@pytest.mark.parametrize("length", [1, 3])
def test_there_is_one_cost_a_stage_and_the_error_names_what_was_given(name, length):
    given = {"forward_s": [1, 1], "input_grad_s": [1, 1], "weight_grad_s": [1, 1]} | {name: [1] * length}
    with pytest.raises(ScheduleError, match=f"forward_s has 2, {name} has {length}; make the numbers agree"):
        Costs(**given)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(
        ScheduleError,
        match=r"costs may only have the fields forward_s, .*weight_grad_bytes, .*; got 'forward'; leave it out",
    ):
        Costs.uniform(2, forward=1)
    with pytest.raises(
        ScheduleError, match=r"costs may only have the fields forward_s, .*'latency' is unknown; leave it out"
    ):
        Costs.from_dict(Costs.uniform(2).to_dict() | {"latency": 1})


@pytest.mark.parametrize("name", ["forward_s", "input_grad_s", "weight_grad_s"])
def test_a_missing_name_is_refused(name):
    values = {key: value for key, value in Costs.uniform(2).to_dict().items() if key != name}
    with pytest.raises(ScheduleError, match=f"'{name}' is missing; add it"):
        Costs.from_dict(values)


def test_missing_optional_costs_take_their_defaults():
    values = {"forward_s": [1, 2], "input_grad_s": [3, 4], "weight_grad_s": [5, 6]}
    assert Costs.from_dict(values) == Costs((1, 2), (3, 4), (5, 6))


def test_a_single_number_in_place_of_one_a_stage_is_refused():
    with pytest.raises(ScheduleError, match="one number per stage"):
        Costs.from_dict({"forward_s": 1, "input_grad_s": 1, "weight_grad_s": 1})


def test_numbers_of_numpy_are_plain_ones():
    costs = Costs(np.array([1, 2]), np.float32([1, 2]), np.ones(2), transfer_s=np.int64(3))
    assert Costs.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs


def test_links_of_another_type_are_refused():
    with pytest.raises(ScheduleError, match=r"links= must be a pipesched\.Links"):
        Costs.uniform(2, links={})
