"""Files that are broken: taken where they are valid all the same, else refused by an error that names them.

``benchmarks/broken_files.py`` makes thousands of them; here are fewer of each sort, and those that were found by it.
"""

import json
import re
import sys
from pathlib import Path

import pytest

from pipesched import Costs, Links, Plan, Profile, Program, Trace, load_program, schedules, simulate, validate
from pipesched.cli.options import read_links
from pipesched.errors import PipeschedError, ScheduleError
from pipesched.json_files import load_json, parse_json
from pipesched.program.lowering import lower
from pipesched.simulation.overheads import Machine, Overheads
from pipesched.testing import run_fake

FILES, LIMIT_S = 10, 60.0
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # the processes that read files have it, too

import broken_files  # noqa: E402
import valid_files  # noqa: E402
from broken_files import SORTS  # noqa: E402

#: Of the checkpoints, a few kinds: each of them takes seconds to begin.
OURS = [sort.name for sort in SORTS if not re.search("safetensors|scaler|chunks, [vt]", sort.name)]


@pytest.mark.one_in(8)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", OURS)
def test_a_broken_file_is_refused_by_an_error_that_names_it_or_is_valid(name):
    (sort,) = [sort for sort in SORTS if sort.name == name]
    found = broken_files.run(sort, FILES, LIMIT_S)
    assert len(found) == FILES
    assert [result for result in found if result[1] not in ("accepted", "refused")] == []
    assert sum(word == "refused" for _, word, *_ in found) > FILES / 3


@pytest.mark.parametrize("sort", SORTS, ids=lambda sort: sort.name)
def test_equal_indices_make_equal_files(sort):
    files = [[broken_files.broken(sort, index) for index in range(5)] for _ in range(2)]
    assert files[0] == files[1]


@pytest.mark.parametrize("sort", SORTS, ids=lambda sort: sort.name)
def test_the_valid_files_are_taken(sort, tmp_path):
    for seed in sort.seeds():
        path = tmp_path / f"valid{sort.ending}"
        path.write_bytes(seed if isinstance(seed, bytes) else seed.encode())
        sort.read(path)


# ---- one reader of JSON ---------------------------------------------------------------------------------------------

READERS = {
    "plan": Plan.load,
    "profile": Profile.load,
    "trace": Trace.load,
    "links": read_links,
    "costs": lambda path: load_json(path, Costs.from_dict),
    "machine": lambda path: load_json(path, Machine.from_dict),
}
NO_JSON = {
    "deep lists": ("[" * 100_000, "at most 32 levels deep"),
    "deep mappings": ('{"x":' * 100_000, "at most 32 levels deep"),
    "lists that are a little too deep": ("[" * 40 + "]" * 40, "at most 32 levels deep"),
    "5,000 digits": (f'{{"x": {"9" * 5000}}}', "the file must be JSON"),
    "more than 64 bits": (
        f'{{"x": {10**30}}}',
        r"must be between -2\*\*63 and 2\*\*63; got 10{30}; correct the number",
    ),
    "no text": (b"\xff\x00\xfe", "the file must be JSON; .*; save the file again"),
    "half a pair": ('{"x": "\\ud800"}', "text in a file must be valid Unicode"),
    "a key twice": (
        '{"x": 1, "x": 2}',
        "a key may appear only once in an object; 'x' appears 2 times; remove the duplicates",
    ),
    "nothing": ("", "the file must be JSON; .* line 1 column 1"),
    "more": ("{} {}", "the file must be JSON; Extra data: line 1 column 4"),
}


@pytest.mark.parametrize("text", NO_JSON)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_json_is_named(tmp_path, reader, text):
    path, (content, said) = tmp_path / "broken.json", NO_JSON[text]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ScheduleError, match=rf"broken\.json: .*{said}"):
        READERS[reader](path)


def test_text_that_is_json_in_any_encoding_is_read():
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
        assert parse_json('{"name": ["ä", 1, -2.5, null, true]}'.encode(encoding)) == {
            "name": ["ä", 1, -2.5, None, True]
        }


# ---- what cannot be true, or is not read ----------------------------------------------------------------------------

SPAN = ["0F0", 0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("read", "values", "said"),
    [
        (Links.from_dict, Links().to_dict() | {"speed": 1}, "links must have .*; got the unknown key 'speed'"),
        (Links.from_dict, Links().to_dict() | {"hosts": [0.5]}, "hosts"),
        (Links.from_dict, Links().to_dict() | {"contended": 1}, "contended of links must be true or false; got 1"),
        (
            Links.from_dict,
            Links().to_dict() | {"special": [[0, 1, {}], [0, 1, {"latency_s": 1}]]},
            r"a pair of ranks may have only one special link; \(0, 1\) has several",
        ),
        (Links.from_dict, Links().to_dict() | {"special": [[0.5, 1, {}]]}, "special must map pairs of ranks to links"),
        (Links.from_dict, Links().to_dict() | {"inside": {"latency_s": 10**400}}, "costs must be below"),
        (Links.from_dict, Links().to_dict() | {"inside": {"latency_s": 10**5000}}, "below .* is a value of type int"),
        (Links.from_dict, Links().to_dict() | {"inside": {"latency_s": True}}, "latency_s of a link must be a number"),
        (Links.from_dict, Links().to_dict() | {"inside": {"bytes_per_s": 1e-320}}, "a speed must be above 0"),
        (
            Machine.from_dict,
            {"threds": None},
            r"a machine must have .* key 'threds' \(did you mean 'threads'\?\)",
        ),
        (Machine.from_dict, {"links": ""}, "links must have the fields inside"),
        (Machine.from_dict, [], r"a machine must have .*; got \[\]; save the file again"),
        (Overheads.from_dict, {"crowding": 3}, "crowding of overheads must be a list; got 3"),
        (Costs.from_dict, {**Costs.uniform(2).to_dict(), "recompute_s": ""}, "recompute_s is ''; pass a list"),
        (Costs.from_dict, {**Costs.uniform(2).to_dict(), "input_bytes": [0.5, 1]}, "whole numbers of bytes .* is 0.5"),
        (Costs.from_dict, {**Costs.uniform(2).to_dict(), "input_bytes": [2**60, 1]}, "bytes below"),
        (Costs.from_dict, {**Costs.uniform(2).to_dict(), "forward_s": [10**400, 1]}, "costs must be below"),
        (Costs.from_dict, {**Costs.uniform(2).to_dict(), "forward_s": [True, 1]}, "forward_s of stage 0 is True"),
        (Trace.from_dict, {"num_ranks": 1, "spans": [SPAN], "nam": ""}, "a trace must have .* key 'nam'"),
        (Trace.from_dict, {"num_ranks": 1, "spans": [["0F0", 0.5, 0, 1]]}, "'0F0' has rank 0.5"),
        (Trace.from_dict, {"num_ranks": 1, "spans": [["0F0", 0, 1, 0]]}, "must not end before it starts"),
        (Trace.from_dict, {"num_ranks": 1, "spans": [["0F0", 0, 0, float("nan")]]}, "finite times, and must not end"),
        (
            Trace.from_dict,
            {"num_ranks": 1, "spans": [["0F0", 3, 0, 1]]},
            "ranks of their trace, numbered from 0; the trace has 1 of them, but a span has number 3",
        ),
        (Trace.from_dict, {"num_ranks": 10**9, "spans": []}, "at most 100,000; got 1000000000"),
        (
            Trace.from_dict,
            {"num_ranks": 1, "spans": [["0B0", 0, 0, 1], ["0F0", 0, 1, 2]]},
            "a backward comes before its forward",
        ),
        (
            Trace.from_dict,
            {"num_ranks": 1, "spans": [SPAN], "versions": [[-1]]},
            r"stage 0 has .*-1.* for 1 micro-batch; write",
        ),
        (
            Trace.from_dict,
            {"num_ranks": 1, "spans": [["3F0", 0, 0, 1]], "costs": Costs.uniform(2).to_dict()},
            "stages with costs of their trace, numbered from 0; the trace has 2 of them, but a span has number 3",
        ),
    ],
)
def test_what_cannot_be_true_or_would_not_be_read_is_refused(read, values, said):
    with pytest.raises(PipeschedError, match=said):
        read(values)


def test_a_trace_of_stages_and_micro_batches_far_from_each_other_takes_no_memory():
    trace = Trace.from_dict({"num_ranks": 1, "spans": [["999999999F999999999", 0, 0, 1], ["0F0", 0, 1, 2]]})
    assert trace.peak_in_flight == (1,)
    assert list(trace.memory(0)) == []


def profile(change):
    values = json.loads(json.dumps(valid_files.profile().to_dict()))
    change(values)
    return values


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda v: v.update(mode="x"), r"a profile must have .* key 'mode' \(did you mean 'model'\?\)"),
        (
            lambda v: v["sizes"]["2"].update(layer={}),
            r"each entry of a profile's sizes must have .*; got the unknown key 'layer' \(did you mean 'layers'\?\)",
        ),
        (
            lambda v: v["sizes"]["2"]["layers"]["layer0"].update(forward_ms=1),
            "layer 'layer0' .* key 'forward_ms'",
        ),
        (lambda v: v["sizes"]["2"]["layers"]["layer0"].pop("parameters"), "parameters of layer 'layer0' is missing"),
        (lambda v: v["sizes"]["2"]["layers"]["layer0"].update(spread=-1), "spread of layer 'layer0' for 2 rows is -1"),
        (
            lambda v: v["sizes"]["2"]["edges"][0][2].update(byte=1),
            "an edge of a profile must have .* key 'byte'",
        ),
        (lambda v: v["sizes"]["2"]["edges"].append(["layer3", "layer1", {}]), "'layer3' -> 'layer1' goes backwards"),
        (lambda v: v["sizes"]["2"]["edges"].append(v["sizes"]["2"]["edges"][0]), "goes backwards or is repeated"),
        (lambda v: v["sizes"].update({"02": v["sizes"].pop("2")}), "whole numbers of rows; got '02'"),
        (lambda v: v.update(model=3), "the field 'model' of a profile must be the model's digest, a string; got 3"),
    ],
)
def test_a_profile_with_what_nobody_reads_or_what_cannot_be_is_refused(change, said):
    with pytest.raises(PipeschedError, match=said):
        Profile.from_dict(profile(change))


# ---- programs -------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            ["microbatches 999999999", "route 0 : 0", "rank 0: 0F0 0B0"],
            "micro-batch 0 of 999,999,999 has a route, but micro-batch 1 has no route",
        ),
        (["microbatches 9999999999", "rank 0: 0F0 0B0"], "line 1: expected whole numbers; .* at most nine digits"),
        ([f"microbatches {'9' * 5000}", "rank 0: 0F0 0B0"], r"line 1: expected whole numbers; .*\(5,000 characters\)"),
        (
            ["microbatches 1", f"rank 0: {'0F0' * 50_000}"],
            r"line 2: an action must have the form .*; got '0F0.*\(150,000 characters\)",
        ),
        (["microbatches 1", "weights -1", "rank 0: 0F0 0B0"], "sets of weights must be numbered from 0 without a gap"),
        (
            ["microbatches 1", "route 0 0 : 0", "rank 0: 0F0 0B0"],
            "a micro-batch must visit at least one stage, and must not visit a sta",
        ),
        (
            ["microbatches 1", "slices 0", "rank 0: 0F0 0B0"],
            "slices_per_microbatch is 0; choose a number of at least 1 that divides the total",
        ),
        (
            ["microbatches 1", "placement 0", "rank 0: 0F0 0SEND_F0>7 0B0"],
            "0SEND_F0>7 is outside the program's 1 stage",
        ),
    ],
)
def test_a_program_that_cannot_be_is_refused_at_once(tmp_path, lines, said):
    path = tmp_path / "mine.txt"
    path.write_text("\n".join(lines))
    with pytest.raises(ScheduleError, match=said) as caught:
        validate(load_program(path))
    assert len(str(caught.value)) < 1000


@pytest.mark.timeout(20)
@pytest.mark.parametrize("cell", ["9" * 5000 + "F0", "0F" + "9" * 5000, "1" * 10 + "F0", "(" * 100_000])
def test_a_cell_with_a_huge_number_is_refused(tmp_path, cell):
    path = tmp_path / "mine.csv"
    path.write_text(f"0F0,{cell}\n")
    with pytest.raises(ScheduleError, match=r"mine\.csv: row 1, column 2: ") as caught:
        load_program(path)
    assert len(str(caught.value)) < 1000


def test_the_slices_of_a_micro_batch_take_one_route():
    text = str(schedules.get("chimera").program(4, 4))
    validate(Program.parse(text))
    with pytest.raises(ScheduleError, match="all slices of a micro-batch must visit the same stages"):
        validate(Program.parse("slices 4\n" + text))
    sliced = Program.parse("slices 2\n" + text)  # those of a micro-batch go back in the wrong order
    with pytest.raises(ScheduleError, match="runs too early; the slices of a micro-batch"):
        validate(sliced)


@pytest.mark.parametrize("placement", [(0, 9), (-1, 0), (0, -2), (0,)])
def test_fake_stages_refuse_a_placement_on_ranks_that_there_are_not(placement):
    lines = ["microbatches 1", f"placement {' '.join(map(str, placement))}", "rank 0: 0F0 0B0", "rank 1: 1F0 1B0"]
    program = Program.parse("\n".join(lines))
    for use in (run_fake, lower, lambda it: run_fake(it, Costs.uniform(it.num_stages), sleeping=True)):
        with pytest.raises(ScheduleError, match=r"every stage must be on an existing rank|is outside|belongs to rank"):
            use(program)
    with pytest.raises(ScheduleError):
        simulate(program, Costs.uniform(program.num_stages))


def test_fake_stages_refuse_routes_and_versions_that_there_are_not():
    text = "microbatches 1\nroute 0 7 : 0\nrank 0: 0F0 0B0\n"
    with pytest.raises(ScheduleError, match=r"a route may only visit stages of the program"):
        run_fake(Program.parse(text))
    text = "microbatches 2\nversions 0 : 0\nrank 0: 0F0 0B0 0F1 0B1 0UPDATE0\n"
    with pytest.raises(PipeschedError, match="has versions for 1 micro-batches, but none for micro-batch 1; pass"):
        run_fake(Program.parse(text))
