"""Plans from profiles and tables without a model: optimizers, memory limits as text, and the warning "too small"."""

import re
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipesched
from pipesched.errors import InputError, MemoryLimitError, PartitionError
from pipesched.planning.search_request import limits_of
from pipesched.simulation.profile import Profile
from pipesched.units import as_bytes, parse_bytes
from tests.support.synthetic_profiles import profile

TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def table(count=4, **cells):
    row = {
        "forward_ms": 10,
        "backward_ms": 20,
        "parameter_bytes": 10**6,
        "output_bytes": 10**5,
        "activation_bytes": 10**6,
    }
    return Profile.from_table([{"name": f"block{at}"} | row | cells for at in range(count)], rows=4)


def planned(known, **options):
    effort = {} if "axes" in options else {"effort": 10_000}
    return pipesched.tune_profile(known, **{"num_ranks": 2, "batch_size": 16} | effort | options)


# ---- memory limits --------------------------------------------------------------------------------------------------

TEXTS = {
    "8GB": 8 * 10**9,
    "8GiB": 8 * 2**30,
    " 8 gib ": 8 * 2**30,
    "2.3KB": 2300,
    "4.35MB": 4_350_000,
    ".5k": 500,
    "1Ti": 2**40,
    "2e9": 2 * 10**9,
    "25e-1KiB": 2560,
    "9007199254740993": 9007199254740993,
    "16": 16,
    "16B": 16,
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_size_as_text_is_an_exact_number_of_bytes(text):
    assert parse_bytes(text) == as_bytes(text) == TEXTS[text]
    assert limits_of(text, 2) == limits_of(TEXTS[text], 2) == limits_of([text, TEXTS[text]], 2) == (TEXTS[text],) * 2


@pytest.mark.parametrize(
    "text", ["", "GB", "8 XB", "8iB", "-1GB", "1,5GB", "nan", "inf", "1e400", "8GBs", "0x8", "٨GB"]
)
def test_text_that_is_no_size_is_refused_where_a_limit_is_expected(text):
    assert parse_bytes(text) is None
    assert as_bytes(text) == text
    with pytest.raises(PartitionError, match="for example, pass 16"):
        limits_of(text, 2)
    with pytest.raises(PartitionError, match=r"memory_limit_bytes must be a number of bytes.*; for example, pass 16"):
        pipesched.partition(table().graph(4), 2, memory_limit_bytes=text)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("text", "number"), [("12MB", 12 * 10**6), ("12MiB", 12 * 2**20), (["12MB"] * 2, [12 * 10**6] * 2)]
)
def test_a_limit_as_text_gives_the_plan_of_the_number(text, number):
    plans = [planned(table(), memory_limit_bytes=limit) for limit in (text, number)]
    assert plans[0].to_dict() == plans[1].to_dict()
    assert max(one.total_bytes for one in plans[0].memory()) <= (number if isinstance(number, int) else number[0])
    cuts = [pipesched.partition(table().graph(4), 2, memory_limit_bytes=limit) for limit in (text, number)]
    assert cuts[0] == cuts[1]


def test_a_limit_as_text_limits_replicas_too():
    axes = {"pipeline": 1, "replicate": 2}
    plans = [planned(table(), axes=axes, memory_limit_bytes=limit) for limit in ("60MB", 60 * 10**6)]
    assert plans[0].to_dict() == plans[1].to_dict()
    with pytest.raises(MemoryLimitError):
        planned(table(), axes=axes, memory_limit_bytes="1MB")


# ---- the optimizer --------------------------------------------------------------------------------------------------


def test_an_optimizer_counts_towards_the_limit():
    known = profile([1.0] * 4, parameter_bytes=[4000] * 4)
    fixed = {"batch_size": 4, "num_microbatches": 4, "schedule": "1f1b", "num_stages": 2, "checkpoint": "never"}
    bare, adam = (planned(known, optimizer=optimizer, **fixed) for optimizer in (None, "adamw"))
    assert [sum(one.optimizer for one in plan.memory()) for plan in (bare, adam)] == [0, 4 * 8000]
    limit = max(one.total_bytes for one in adam.memory())
    for optimizer in ("adam", 8, 8.0):
        plan = planned(known, optimizer=optimizer, memory_limit_bytes=limit, **fixed)
        assert max(one.total_bytes for one in plan.memory()) <= limit
    with pytest.raises(MemoryLimitError):
        planned(known, optimizer=80, memory_limit_bytes=limit, **fixed)


@pytest.mark.parametrize("optimizer", ["adamax", -1, True, [], lambda parameters: None])
def test_an_optimizer_of_a_profile_is_a_name_or_a_number(optimizer):
    with pytest.raises(InputError, match=r"sgd, momentum, adam, adamw, or the number of bytes.*; for example, pass"):
        planned(table(), optimizer=optimizer)


def test_a_plan_repeats_what_the_table_did_not_say_unless_the_caller_says_it():
    assert planned(table()).notes == table().notes
    assert not any("optimizer" in note for note in planned(table(), optimizer="sgd").notes)


# ---- a saved profile ------------------------------------------------------------------------------------------------


def test_a_saved_profile_gives_the_plan_of_the_profile(tmp_path):
    table().save(tmp_path / "profile.json")
    assert planned(tmp_path / "profile.json").to_dict() == planned(table()).to_dict()
    assert planned(str(tmp_path / "profile.json")).to_dict() == planned(table()).to_dict()


def test_tune_gives_the_same_plan_without_trial_runs():
    own = pipesched.tune(table(), num_ranks=2, batch_size=16, ranks_are="processes", effort=10_000)
    assert own.to_dict() == planned(table()).to_dict()


# ---- the warning "too small" ----------------------------------------------------------------------------------------


def said(known, **options):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        plan = planned(known, **options)
    return plan, [str(one.message) for one in seen if "too small" in str(one.message)]


@settings(max_examples=15)
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=5),
    st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    st.sampled_from(
        [{}, {"num_stages": 1}, {"num_ranks": 1}, {"boundaries": []}, {"num_microbatches": 1}, {"all_ranks": True}]
    ),
)
def test_the_warning_contradicts_neither_its_times_nor_the_request(times, latency_s, options):
    links = pipesched.Links(inside=pipesched.Link(latency_s=latency_s))
    plan, texts = said(profile([float(time) for time in times]), links=links, **{"batch_size": 4} | options)
    if not texts:
        return
    assert not {"num_stages", "num_ranks", "boundaries", "all_ranks"} & {*options}
    assert plan.program.num_ranks == 1
    (found,) = re.findall(r"one device takes ([\d.]+) (\w+) per step, .* takes ([\d.]+) (\w+);", texts[0])
    one_s, several_s = (float(number) * TIMES[unit] for number, unit in (found[:2], found[2:]))
    assert one_s <= several_s


def test_the_warning_comes_where_one_device_is_faster_and_others_were_possible():
    slow = pipesched.Links(inside=pipesched.Link(latency_s=50.0))
    assert said(profile([1.0] * 4), links=slow, batch_size=4)[1]
    for asked in ({"num_stages": 1}, {"boundaries": []}, {"together": [[f"layer{at}" for at in range(4)]]}):
        assert not said(profile([1.0] * 4), links=slow, batch_size=4, **asked)[1]
