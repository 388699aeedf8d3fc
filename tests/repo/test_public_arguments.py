"""Every public function with values that it does not take, damaged files, and the options of the command."""

import json
from copy import deepcopy

import pytest
import torch
from click.testing import CliRunner

import pipesched
from pipesched import Costs, Link, Links, Plan, Profile, Program, Trace, viz
from pipesched.cli import options
from pipesched.cli.main import main
from pipesched.errors import PipeschedError, ScheduleError
from pipesched.planning.report import report as reports
from pipesched.testing import MemoryMeter, check_schedule, reference_step, run_fake
from tests.support.refused_pipelines import linears, mse
from tests.support.wrong_arguments import STRANGE, but, cases, refused

PROGRAM = pipesched.schedules.get("1f1b").program(2, 4)
COSTS = Costs.uniform(2)
TRACE = pipesched.simulate(PROGRAM, COSTS)
CELLS = {"forward_ms": 1, "backward_ms": 2, "parameter_bytes": 4, "output_bytes": 1, "activation_bytes": 1}
TABLE = [{"name": name} | CELLS for name in "ab"]
TABLE_PROFILE = Profile.from_table(TABLE, rows=4)
NUMBERS = "a bool", "zero", "a number", "a fraction"  # what may be an amount
LISTS = "an empty list", "an empty dict"


def layer(**figures):
    return {
        "forward_s": 1e-3,
        "input_grad_s": 1e-3,
        "weight_grad_s": 1e-3,
        "backward_s": 2e-3,
        "parameters": (),
    } | figures


@pytest.fixture(scope="module")
def profile():
    return pipesched.profile(linears(), torch.ones(4, 3), rows=[2, 4])


@pytest.fixture(scope="module")
def plan(profile):
    return pipesched.tune(profile, num_ranks=2, batch_size=8)


#: Function, good arguments, and of which arguments which strange values are refused.
CORE = {
    "simulate": (pipesched.simulate, {"program": PROGRAM, "costs": COSTS}, {"program": but(), "costs": but()}),
    "validate": (pipesched.validate, {"program": PROGRAM}, {"program": but()}),
    "lower": (pipesched.lower, {"program": PROGRAM}, {"program": but()}),
    "lower_bound": (
        pipesched.lower_bound,
        {"costs": COSTS, "num_microbatches": 4},
        {"costs": but(), "num_microbatches": but("a number"), "placement": but("None", "a tensor")},
    ),
    "Program.parse": (Program.parse, {"text": str(PROGRAM)}, {"text": but("an empty text")}),
    "Costs.uniform": (
        Costs.uniform,
        {"num_stages": 2},
        {
            "num_stages": but("a number"),
            "forward_s": but(*NUMBERS),
            "transfer_s": but(*NUMBERS),
            "links": but("None"),
            "overheads": but("None"),
        },
    ),
    "Costs.scaled": (COSTS.scaled, {"factor": 2}, {"factor": but(*NUMBERS)}),
    "Costs.from_dict": (Costs.from_dict, {"values": COSTS.to_dict()}, {"values": but()}),
    "Link": (Link, {}, {"latency_s": but(*NUMBERS), "bytes_per_s": but("None", *NUMBERS), "spread": but(*NUMBERS)}),
    "Links": (
        Links,
        {},
        {
            "inside": but(),
            "between": but(),
            "hosts": but(*LISTS, "a dict", "a tensor", "a bool"),
            "special": but("an empty text", *LISTS),
        },
    ),
    "Links.of_hosts": (
        Links.of_hosts,
        {"ranks_per_host": 1, "num_ranks": 2},
        {"ranks_per_host": but("a number"), "num_ranks": but("a number")},
    ),
    "schedules.get": (pipesched.schedules.get, {"name": "1f1b"}, {"name": but()}),
    "Schedule.program": (
        pipesched.schedules.get("interleaved-1f1b").program,
        {"num_ranks": 2, "num_microbatches": 2},
        {
            "num_ranks": but("a number"),
            "num_microbatches": but("a number"),
            "steps": but(),
            "chunks_per_rank": but("a number"),
        },
    ),
    "schedule": (
        pipesched.schedule,
        {"name": "own"},
        {"name": but("a text"), "placement": but("a function", "a module", "a class"), "num_chains": but("a number")},
    ),
    "Trace": (
        Trace,
        {"spans": (), "num_ranks": 2},
        {"spans": but(*LISTS, "a tensor"), "num_ranks": but("zero", "a number"), "costs": but("None")},
    ),
    "Trace.in_flight": (TRACE.in_flight, {"rank": 0}, {"rank": but("zero")}),
    "Trace.load": (Trace.load, {}, {"path": but("an empty text", "a text")}),
    "Plan.load": (Plan.load, {}, {"path": but("an empty text", "a text")}),
    "Profile.load": (Profile.load, {}, {"path": but()}),
    "load_program": (pipesched.load_program, {}, {"path": but("an empty text", "a text")}),
    "Plan.from_dict": (Plan.from_dict, {}, {"values": but("a tensor")}),
    "Profile": (Profile, {}, {"graphs": but()}),
    "Profile.from_table": (
        Profile.from_table,
        {"table": TABLE, "rows": 4},
        {
            "table": but(),
            "rows": but("a number"),
            "optimizer": but("None", "zero", "a number", "a fraction"),
            "bytes_per_parameter": but("a number", "a fraction"),
            "machine": but("None"),
        },
    ),
    "Profile.with_optimizer": (
        TABLE_PROFILE.with_optimizer,
        {},
        {"optimizer": but("zero", "a number", "a fraction")},
    ),
    "tune_profile": (
        pipesched.tune_profile,
        {"profile": TABLE_PROFILE, "num_ranks": 2, "batch_size": 4},
        {
            "profile": but(),
            "num_ranks": but("a number"),
            "batch_size": but("a number"),
            "memory_limit_bytes": but("None", "a number", "a fraction"),
            "optimizer": but("None", "zero", "a number", "a fraction"),
            "together": but(*LISTS, "a tensor"),
            "links": but("None"),
            "effort": but("None", "a number"),
            "ranks_are": but(),
            "offload": but("a bool"),
            "axes": but("None"),
        },
    ),
    "Report": (pipesched.Report, {}, {"plan": but()}),
    "StepLog": (pipesched.StepLog, {}, {"pipe": but()}),
    "MemoryMeter": (MemoryMeter, {}, {"pipe": but()}),
    "run_fake": (run_fake, {"program": PROGRAM}, {"program": but(), "costs": but("None")}),
    "check_schedule": (
        check_schedule,
        {"schedule": pipesched.schedules.get("gpipe"), "max_ranks": 2, "max_microbatches": 2, "report": False},
        {
            "schedule": but("a function", "a module", "a class"),
            "max_ranks": but("a number"),
            "max_microbatches": but("a number"),
        },
    ),
    "plot_timeline": (viz.plot_timeline, {"trace": TRACE}, {"trace": but(), "ax": but("None")}),
    "plot_memory": (viz.plot_memory, {"trace": TRACE}, {"trace": but(), "ax": but("None")}),
    "plot_compare": (viz.plot_compare, {}, {"traces": but()}),
    "text_timeline": (
        viz.text_timeline,
        {"trace": TRACE},
        {"trace": but(), "width": but("zero", "a number", "negative")},
    ),
    "reference_step": (
        lambda model, **given: reference_step(model, torch.ones(2, 3), target=torch.ones(2, 3), **given),
        {"model": linears(), "loss_fn": mse},
        {
            "model": but("a module", "an empty list"),
            "loss_fn": but("None", "a function", "a module", "a class"),
            "num_microbatches": but("a number"),
            "seed": but("None", "a bool", "zero", "a number", "negative"),
            "intra_op_threads": but("a number"),
        },
    ),
}
CASES = [pytest.param(name, *each.values, id=f"{name}: {each.id}") for name in CORE for each in cases(CORE[name][2])]


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("name", "argument", "strange"), CASES)
def test_an_argument_that_is_not_taken(name, argument, strange):
    function, good, _ = CORE[name]
    refused(function, **good | {argument: STRANGE[strange]})


PLANNING = {
    "num_ranks": but("a number"),
    "batch_size": but("a number"),
    "memory_limit_bytes": but("None", "zero", "a number", "a fraction"),
    "schedule": but(),
    "num_stages": but("None", "a number"),
    "num_microbatches": but("None", "a number"),
    "boundaries": but("None", *LISTS),
    "together": but(*LISTS, "a tensor"),
    "checkpoint": but("None", "an empty dict"),
    "links": but("None"),
    "confirm": but("None", "zero"),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("argument", "name"), cases(PLANNING))
def test_an_argument_of_tune_that_is_not_taken(profile, argument, name):
    refused(pipesched.tune, **{"model": profile, "num_ranks": 2, "batch_size": 8} | {argument: STRANGE[name]})


PARTITION = {
    "graph": but(),
    "num_stages": but("a number"),
    "communication": but(),
    "latency_s": but(*NUMBERS),
    "in_flight": but("None", "a function", "a module", "a class"),
    "weight_copies": but(*NUMBERS),
    "starts": but("None", "an empty dict"),
    "together": but(*LISTS, "a tensor"),
    "placement": but("None"),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("argument", "name"), cases(PARTITION))
def test_an_argument_of_partition_that_is_not_taken(profile, argument, name):
    refused(pipesched.partition, **{"graph": profile.graph(4), "num_stages": 2} | {argument: STRANGE[name]})


PROFILE = {
    "rows": but("None"),
    "device": but(),
    "intra_op_threads": but("a number"),
    "optimizer": but("None", "a module", "a class", "a function"),
    "cache": but("None", "an empty text", "a text"),
}


@pytest.mark.parametrize(("argument", "name"), cases(PROFILE))
def test_an_argument_of_profile_that_is_not_taken(argument, name):
    refused(pipesched.profile, model=linears(), sample=torch.ones(2, 3), **{argument: STRANGE[name]})


@pytest.mark.parametrize(
    ("argument", "name"),
    cases({"rows": but("a number"), "stages": but("a tensor"), "keep": but("None", "an empty dict")}),
)
def test_an_argument_of_a_profiles_costs_that_is_not_taken(profile, argument, name):
    refused(profile.costs, **{"stages": [["0", "1"], ["2", "3"]], "rows": 4} | {argument: STRANGE[name]})


# ---- files ----------------------------------------------------------------------------------------------------------

WRONG = [None, -1, "x", [None], {"x": 1}]  # as JSON has them


def places(value, at=()):
    """Where a value of JSON can be damaged: all of its keys, of lists the first entry."""
    yield at
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*at, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*at, 0))


def damaged(values):
    for at in places(values):
        for wrong in WRONG:
            if not at:
                yield wrong
                continue
            copy = deepcopy(values)
            inner = copy
            for key in at[:-1]:
                inner = inner[key]
            inner[at[-1]] = wrong
            yield copy


def use_plan(plan):
    plan.explain()
    plan.memory()
    str(pipesched.Report(plan))


def use_trace(trace):
    viz.text_timeline(trace)
    assert trace.makespan_s >= 0
    assert trace.above_bound is None or trace.peak_bytes is not None


def use_profile(profile):
    profile.costs([["0", "1"], ["2", "3"]], 3)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("kind", "use"), [(Plan, use_plan), (Profile, use_profile), (Trace, use_trace)])
def test_a_damaged_file_is_refused_or_serves(request, tmp_path, kind, use):
    """Whatever one value in it is instead, what was read can be used, or the error names the file."""
    made = {Plan: "plan", Profile: "profile"}.get(kind)
    values = json.loads(json.dumps((request.getfixturevalue(made) if made else TRACE).to_dict()))
    path = tmp_path / "file.json"
    for other in damaged(values):
        path.write_text(json.dumps(other))
        try:
            read = kind.load(path)
        except ScheduleError as error:
            named = str(path) in str(error)
            assert named
            continue
        try:
            use(read)
        except PipeschedError:
            continue


@pytest.mark.parametrize("kind", [Plan, Profile, Trace])
@pytest.mark.parametrize("text", ["", "[", "[]", "null", "3", '{"a": 1}', "not JSON", '{"version": 99}'])
def test_a_file_of_something_else_is_named(tmp_path, kind, text):
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(ScheduleError, match=r"file\.json"):
        kind.load(path)


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["graph", "nothing.py:make", "-o", "a.xyz"],
            "suffix must be one of .png, .svg, .pdf; got 'a.xyz'; change the suffix",
        ),
        (["graph", "nothing.py:make", "-o", "layers"], "got 'layers'"),
        (["graph", "nothing.py:make", "-o", "no/such/folder/a.png"], "there is no folder no/such/folder; create it"),
        (
            ["tune", "nothing.json", "--batch", "8", "-o", "plan.csv"],
            "suffix must be one of .json, .html, .txt, .png, .svg, .pdf; got 'plan.csv'",
        ),
        (["tune", "nothing.json", "--batch", "8", "--memory-limit", "ten"], "'ten' is not a number of bytes"),
        (
            ["report", "{plan}", "-o", "a.xyz"],
            "suffix must be one of .html, .txt, .json, .png, .svg, .pdf; got 'a.xyz'",
        ),
    ],
)
def test_options_are_looked_at_before_anything_is_measured(tmp_path, plan, arguments, says):
    plan.save(tmp_path / "plan.json")
    ran = CliRunner().invoke(main, [part.format(plan=tmp_path / "plan.json") for part in arguments])
    assert ran.exit_code == 2
    assert says in " ".join(ran.stderr.split())


@pytest.mark.parametrize(
    "model", ["nothing.py:make", "{folder}", "{script}", "{script}:nothing", "{script}:NUMBER", "nothing"]
)
@pytest.mark.parametrize("command", [["graph"], ["tune", "--batch", "8"]])
def test_scripts_without_a_model_are_named(tmp_path, command, model):
    script = tmp_path / "own_script.py"
    script.write_text("NUMBER = 3\n")
    ran = CliRunner().invoke(main, [*command, model.format(folder=tmp_path, script=script)])
    assert ran.exit_code == 1
    assert isinstance(ran.exception, SystemExit)
    assert "correct the path" in ran.stderr or "(model, sample)" in ran.stderr


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "names no function; for example, pass {script}:make, where make() returns (model, sample)"),
        (":", "names no function; for example, pass {script}:make"),
        (
            ":sized",
            "{script}:sized has the signature (size) (missing a required argument: 'size'); give each argument a de",
        ),
    ],
)
def test_scripts_without_a_function_that_takes_nothing_say_what_to_name(tmp_path, name, says):
    script = tmp_path / "own_script.py"
    script.write_text("def sized(size): ...\n")
    ran = CliRunner().invoke(main, ["tune", f"{script}{name}", "--batch", "8"])
    assert ran.exit_code == 1
    assert says.format(script=script) in ran.stderr


def test_the_endings_are_those_of_reports():
    assert (reports._PICTURES, tuple(reports._TEXTS)) == (options.PICTURES, options.TEXTS)
