import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesched import Action, Kind
from pipesched.errors import ScheduleError
from pipesched.program.actions import Holding, Lane
from tests.support.random_programs import quick

TRANSFERS = {Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B}
index = st.integers(0, 10**4)
actions = st.sampled_from(Kind).flatmap(
    lambda kind: st.builds(Action, index, st.just(kind), index, index if kind in TRANSFERS else st.none())
)


@quick
@given(actions)
def test_parse_is_the_inverse_of_str(action):
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(2, Kind.F, 0), "2F0"),
        (Action(0, Kind.B, 13), "0B13"),
        (Action(11, Kind.I, 4), "11I4"),
        (Action(3, Kind.W, 1), "3W1"),
        (Action(3, Kind.R, 1), "3R1"),
        (Action(0, Kind.SEND_F, 3, 1), "0SEND_F3>1"),
        (Action(1, Kind.RECV_F, 3, 0), "1RECV_F3<0"),
        (Action(1, Kind.SEND_B, 3, 0), "1SEND_B3>0"),
        (Action(0, Kind.RECV_B, 3, 1), "0RECV_B3<1"),
        (Action(2, Kind.REDUCE, 0), "2REDUCE0"),
    ],
)
def test_an_action_has_a_text_form_that_parse_reads(action, text):
    assert str(action) == text
    assert Action.parse(text) == action


def test_a_kind_prints_as_its_text_form():
    computing, transfers = ["F", "B", "I", "W", "R", "NORM", "UPDATE"], ["SEND_F", "RECV_F", "SEND_B", "RECV_B"]
    copies, collectives = ["OFFLOAD", "FREE", "FETCH"], ["REDUCE", "UNSHARD", "RESHARD"]
    redundancy = ["MIRROR", "KEEP", "REPLAY"]
    assert [str(kind) for kind in Kind] == [*computing, *transfers, *copies, *collectives, *redundancy]


@pytest.mark.parametrize(
    "text", ["", "F", "2F", "F0", "2f0", "2X0", "-1F0", "2F-1", "2F0 ", " 2F0", "2F0 2F1", "2.0F0", "2F0\n"]
)
def test_what_is_no_action_is_refused_with_the_form_and_the_kinds(text):
    with pytest.raises(ScheduleError) as error:
        Action.parse(text)
    message = str(error.value)
    assert f"got {text!r}" in message
    assert "such as 2F0" in message
    assert "; use one of the kinds F, B, I, W, R, NORM, UPDATE, SEND_F, RECV_F, SEND_B, RECV_B" in message


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("2F0>1", "write 2F0"),
        ("2W0<1", "write 2W0"),
        ("0SEND_F3", "write 0SEND_F3><stage>"),
        ("0SEND_F3<1", "write 0SEND_F3><stage>"),
        ("1RECV_B3>0", "write 1RECV_B3<<stage>"),
        ("1RECV_F3", "write 1RECV_F3<<stage>"),
    ],
)
def test_a_wrong_peer_is_refused_with_the_right_form(text, remedy):
    with pytest.raises(ScheduleError, match="a send must end with '>'") as error:
        Action.parse(text)
    assert f"got {text!r}" in str(error.value)
    assert str(error.value).endswith(remedy)


def test_only_plain_digits_are_numbers():
    with pytest.raises(ScheduleError, match="such as 2F0"):
        Action.parse("\N{ARABIC-INDIC DIGIT TWO}F0")


@pytest.mark.parametrize("kind", Kind)
def test_transfers_and_copies_occupy_the_copy_lane_collectives_and_redundancy_their_own_and_all_else_computes(kind):
    copies = {*TRANSFERS, Kind.OFFLOAD, Kind.FREE, Kind.FETCH, Kind.RESHARD}
    others = dict.fromkeys(copies, Lane.COPY) | dict.fromkeys((Kind.REDUCE, Kind.UNSHARD), Lane.COLLECTIVE)
    others |= dict.fromkeys((Kind.MIRROR, Kind.KEEP, Kind.REPLAY), Lane.REDUNDANCY)
    assert Action(0, kind, 0).lane is others.get(kind, Lane.COMPUTE)


def test_what_a_pair_holds_is_all_given_back_by_either_form_of_backward():
    of_no_pair = {Holding.WEIGHTS, Holding.REDUCTION, Holding.GATHERED}
    of_a_pair = set(Holding) - of_no_pair - {Holding.OFFLOADED}  # the latter is a part of the activations
    assert set(Kind.B.row.gives) == set(Kind.W.row.gives) == of_a_pair
    assert Holding.WEIGHT_GRAD not in Kind.I.row.gives
