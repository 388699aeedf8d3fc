import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from pipesched import Program, __version__, schedules
from pipesched.cli import main as cli
from pipesched.cli.main import main
from pipesched.errors import ScheduleError
from pipesched.simulation.costs import Costs
from pipesched.simulation.links import Link, Links
from tests.support.synthetic_profiles import profile

WRONG_ORDER = "microbatches 2\nrank 0: 0F0 0B0 0F1 0B1\nrank 1: 1B0 1F0 1F1 1B1\n"
DEADLOCK = "microbatches 2\nrank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F1 1B1 1F0 1B0\n"
NOT_EXACT = "microbatches 2\nrank 0: 0F1 0F0 0B0 0B1\n"


def run(*args, text=None):
    return CliRunner().invoke(main, [str(arg) for arg in args], input=text)


def lines(*args, text=None):
    result = run(*args, text=text)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


@pytest.fixture
def file(tmp_path):
    def write(text, name="program.txt"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_list_names_every_schedule_with_its_chunks():
    rows = lines("list")
    assert [row.split()[0] for row in rows] == schedules.names(sliced=True)
    assert "seq1f1b" in schedules.names(sliced=True)
    for row in rows:
        schedule = schedules.get(row.split()[0])
        assert int(row.split()[1]) == schedule.chunks_per_rank
        assert row.endswith(schedule.description.splitlines()[0])


def test_show_prints_the_timeline_and_the_figures():
    assert lines("show", "1f1b", "--ranks", 2, "--microbatches", 3, "--width", 80) == [
        "rank 0 | F0 F1 .. .. B0--- F2 B1--- .. B2---",
        "rank 1 | .. F0 B0--- F1 B1--- F2 B2--- .. ..",
        "1f1b: makespan 12 s, bubble 25.0%, 20.0% above the bound, peak in flight 2; 3 columns are 1 s",
        "bound 10 s; span 12 s; peak in flight per rank: 2 1",
    ]


def test_show_has_4_ranks_and_8_microbatches_unless_told():
    assert lines("show", "1f1b") == lines("show", "1f1b", "--ranks", 4, "--microbatches", 8, "--text")
    assert "makespan 33 s" in lines("show", "1f1b")[4]


def test_span_is_the_longest_of_the_ranks_own(file):
    assert "span 6 s; " in lines("show", "1f1b", "--ranks", 2, "--microbatches", 1)[-1]
    # Each rank works for 2 s, the second one from 1 to 3.
    forward_only = "microbatches 2\nforward-only\nrank 0: 0F0 0F1\nrank 1: 1F0 1F1\n"
    *_, summary, figures = lines("show", file(forward_only))
    assert "makespan 3 s" in summary
    assert figures.startswith("span 2 s; ")


def test_show_takes_costs():
    costs = ["--forward", 2, "--input-grad", 3, "--weight-grad", 4, "--transfer", 0.5]
    # One micro-batch: F, transfer, F, B, transfer, B.
    assert "makespan 19 s" in lines("show", "gpipe", "--ranks", 2, "--microbatches", 1, *costs)[2]


def test_show_and_compare_take_links(file):
    links = Links(Link(latency_s=1), special={(1, 2): Link(latency_s=1, bytes_per_s=5)})
    path = file(json.dumps(links.to_dict()), "links.json")
    costs = ["--ranks", 3, "--microbatches", 1, "--links", path, "--output-bytes", 10]
    # Three F and three B, 1 s on each of four ways, and 10 bytes at 5 a second on one of them.
    assert "makespan 15 s" in lines("show", "gpipe", *costs)[3]
    assert lines("compare", "gpipe", *costs)[1].split()[1:3] == ["15", "s"]


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"inside": 3}'])
def test_a_file_of_no_links_is_named(file, text):
    path = file(text, "links.json")
    result = run("show", "gpipe", "--links", path)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {path}: ")


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_a_chunk_takes_its_share_of_a_ranks_costs(chunks):
    # Without a bubble the makespan is the rank's work, whatever its chunks.
    summary = lines("show", "interleaved-1f1b", "--chunks", chunks, "--ranks", 1)[1]
    assert "makespan 24 s, bubble 0.0%" in summary


def test_show_chunks():
    program = Program.parse(run("show", "interleaved-1f1b", "--chunks", 3, "--ranks", 2, "--program").stdout)
    assert program == schedules.get("interleaved-1f1b").program(2, 8, chunks_per_rank=3)


def test_show_program_is_what_check_reads():
    text = run("show", "interleaved-1f1b", "--program").stdout
    assert text == str(schedules.get("interleaved-1f1b").program(4, 8))
    assert lines("check", "-", text=text) == [
        "OK: 4 ranks, 8 stages, 8 micro-batches, bit-identical results, peak in flight per rank: 11 9 7 5"
    ]


def test_show_program_with_text_still_is_a_program():
    both = run("show", "1f1b", "--program", "--text", "--width", 120).stdout
    assert Program.parse(both) == schedules.get("1f1b").program(4, 8)
    assert "# 1f1b: makespan 33 s" in both


def test_show_draws_reductions_over_replicas_and_counts_their_bytes():
    """8 replicas, 8 GB a rank and GB/s: an all-reduce of 2 x 7/8 x 8 GB takes 14 s, a half of it 7 s."""
    options = ["--ranks", 2, "--microbatches", 4, "--replicas", 8, "--weight-bytes", "8GiB", "--width", 200]
    options += ["--replica-bandwidth", "1GiB"]
    for zero, sent, total in (
        (0, "14 GiB of gradients", "28 s"),
        (1, "14 GiB of gradients; 7 GiB of updated weights (not in the timeline)", "28 s"),
        (2, "7 GiB of gradients; 7 GiB of updated weights (not in the timeline)", "14 s"),
        (3, "7 GiB of gradients; 7 GiB of weights", "28 s"),
    ):
        *drawn, axes, bytes_sent, hidden = lines("show", "1f1b", *options, "--zero", zero)
        assert axes == "axes: pipeline 2 x replicate 8" + (f", zero={zero}" if zero else "")
        assert bytes_sent == f"each rank sends to other replicas in a step: {sent}"
        assert hidden.startswith(f"collectives take {total}, summed over 2 ranks: ")
        assert hidden.endswith(" exposed")
        assert drawn[1].startswith("comm" if zero == 3 else "reduce")
    program = Program.parse(run("show", "1f1b", *options, "--zero", 3, "--program").stdout)
    assert program.buckets == (4, 4)
    assert program.has_gathers


def test_show_gathers_the_weights_of_several_chunks_once_or_often():
    shape = ["interleaved-1f1b", "--ranks", 2, "--replicas", 2, "--zero", 3, "--weight-bytes", "4GiB"]
    assert "; 2 GiB of weights" in lines("show", *shape)[-2]
    assert "of weights, with up to 6 gathers per stage" in lines("show", *shape, "--gather-often")[-2]


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["1f1b", "--zero", 2], 2, "got --zero 2 and one replica; pass --replicas 2 or more"),
        (["dualpipe", "--replicas", 2], 1, "has 8 stages with 4 weight copies; leave --replicas out"),
        (["pipedream", "--replicas", 2], 1, "choose a schedule that updates once a step"),
        (["1f1b", "--replicas", 2, "--weight-bytes", "much"], 2, "'much' is not a number of bytes"),
        (["1f1b", "--replicas", 2, "--replica-bandwidth", "0"], 1, "bytes_per_s"),
    ],
)
def test_replicas_that_show_refuses(args, code, said):
    result = run("show", *args)
    assert result.exit_code == code
    assert said in result.stderr.replace("\n", " ")


def test_show_writes_pictures_and_says_so(tmp_path):
    png, chrome = tmp_path / "a picture", tmp_path / "trace.json"
    result = run("show", "1f1b", "--png", png, "--chrome", chrome)
    assert result.exit_code == 0
    assert result.stdout == ""
    assert result.stderr.splitlines() == [f"wrote {png}", f"wrote {chrome}"]
    assert png.read_bytes().startswith(b"\x89PNG")
    events = json.loads(chrome.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 4 * 8 * 2


def test_show_reads_a_program_from_a_file(file):
    text = str(schedules.get("gpipe").program(3, 2))
    assert lines("show", file(text), "--width", 90) == lines(
        "show", "gpipe", "--ranks", 3, "--microbatches", 2, "--width", 90
    )


def test_show_and_check_read_tables(file):
    program = schedules.get("zb-v").program(2, 3)
    path = file("".join(",".join(map(str, order)) + "\n" for order in program.orders), "zb-v.csv")
    assert lines("show", path, "--width", 150) == lines(
        "show", "zb-v", "--ranks", 2, "--microbatches", 3, "--width", 150
    )
    assert lines("show", path, "--program") == str(program).splitlines()
    assert lines("check", path)[0].startswith("OK: 2 ranks, 4 stages, 3 micro-batches, bit-identical results")
    wrong = file("0F0,0F1,0B0,0X1\n", "wrong.csv")
    for command in ("show", "check", "compare"):
        assert f"Error: {wrong}: row 1, column 4: a cell must be empty or" in run(command, wrong).stderr
    deadlock = file("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "deadlock.csv")
    assert f"Error: {deadlock}: deadlock: 2 of 2 ranks wait" in run("check", deadlock).stderr


OWN = """
from __future__ import annotations
from dataclasses import dataclass
import pipesched


@dataclass
class Settings:
    depth: int = 1


@pipesched.schedule("one-by-one")
def one_by_one(rank: int, shape: pipesched.Shape) -> pipesched.Order:
    order = pipesched.Order(shape)
    for _ in range(shape.num_microbatches):
        order.F(rank)
        order.B(rank)
    return order


def not_decorated(rank, shape):
    return one_by_one.function(rank, shape)


def made(ranks=3):
    return one_by_one.program(ranks, 2)


fixed = made()


@pipesched.schedule("all-backwards-first")
def wrong(rank, shape):
    order = pipesched.Order(shape)
    order.B(rank)
    order.F(rank)
    return order


def no_order(rank, shape):
    return None


def too_many(rank, shape, costs):
    return None


number = 3
"""


@pytest.fixture
def own(file, monkeypatch):
    path = file(OWN, "own_schedules.py")
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "own_schedules.py"
    sys.modules.pop("own_schedules", None)


@pytest.mark.parametrize("place", ["own_schedules.py", "own_schedules"])
@pytest.mark.parametrize("name", ["one_by_one", "not_decorated"])
def test_show_check_and_compare_take_a_schedule_of_a_file(own, place, name):
    shape = ["--ranks", 3, "--microbatches", 2]
    *_, summary, figures = lines("show", f"{place}:{name}", *shape)
    assert summary.startswith(f"{name.replace('_', '-')}: makespan 18 s, bubble 66.7%")
    assert figures.endswith("peak in flight per rank: 1 1 1")
    assert lines("check", f"{place}:{name}", *shape, "--max-in-flight", 1, "--exact") == [
        "OK: 3 ranks, 3 stages, 2 micro-batches, bit-identical results, peak in flight per rank: 1 1 1"
    ]
    assert [row.split()[0] for row in lines("compare", "1f1b", f"{place}:{name}")[1:]] == ["1f1b", f"{place}:{name}"]
    program = Program.parse(run("show", f"{place}:{name}", "--program", *shape).stdout)
    assert (program.num_ranks, program.num_microbatches) == (3, 2)


@pytest.mark.parametrize("name", ["fixed", "made"])
def test_a_program_of_a_file_has_its_own_shape(own, name):
    assert lines("check", f"{own}:{name}")[0].startswith("OK: 3 ranks, 3 stages, 2 micro-batches")
    assert "makespan 18 s" in lines("show", f"{own}:{name}")[3]
    for command in ("show", "check"):
        result = run(command, f"{own}:{name}", "--ranks", 4)
        assert result.exit_code == 2
        assert "fixed numbers of ranks" in result.stderr


@pytest.mark.parametrize("command", ["show", "check", "compare"])
@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("own_schedules.py", "names no function; for example, pass own_schedules.py:my_schedule"),
        ("own_schedules.py:one_by_on", "has no attribute 'one_by_on'); correct the path or the name; the nearest is"),
        ("elsewhere.py:one_by_one", "No such file or directory"),
        ("elsewhere:one_by_one", "No module named 'elsewhere'"),
        ("own_schedules.py:number", "own_schedules.py:number is 3; decorate the function with @pipesched.schedule"),
        ("own_schedules.py:wrong", "own_schedules.py:wrong: rank 0: stage 0 must run F and either B"),
        ("own_schedules.py:no_order", "'no-order' returned None; end the function with 'return order'"),
        ("own_schedules.py:too_many", "'too-many' takes (rank, shape, costs); make the options keyword-only"),
        ("damaged.py:anything", "invalid syntax"),
    ],
)
def test_what_is_no_schedule_of_a_file_is_named(own, file, command, target, said):
    file("def\n", "damaged.py")
    result = run(command, target)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert said in result.stderr, result.stderr


def test_tune_takes_a_schedule_of_a_file(own, tmp_path):
    profile([1e-3] * 4, (1, 2)).save(tmp_path / "profile.json")
    options = ["--ranks", 2, "--batch", 8, "--schedule", f"{own}:one_by_one"]
    assert "one-by-one" in "\n".join(lines("tune", tmp_path / "profile.json", *options))


def test_where_there_is_no_bound_none_is_shown(file):
    path = file("microbatches 2\nforward-only\nrank 0: 0F0 0F1\n")
    assert lines("compare", path)[1].split()[-5:] == ["2", "s", "0.0%", "-", "1"]
    assert "bound" not in lines("show", path)[-1]


def test_show_refuses_a_shape_for_a_file(file):
    result = run("show", file(str(schedules.get("gpipe").program(3, 2))), "--ranks", 4)
    assert result.exit_code == 2
    assert "micro-batches, chunks and steps; got an option for one of these numbers with the file" in result.stderr


def test_show_with_a_narrow_width_is_narrow():
    rows = lines("show", "1f1b", "--ranks", 8, "--microbatches", 40, "--width", 40)[:8]
    assert max(map(len, rows)) == 40


@pytest.mark.parametrize("command", ["show", "compare"])
def test_an_unknown_schedule_lists_the_known_ones(command):
    result = run(command, "2f2b")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: unknown schedule; got '2f2b'")
    assert all(name in result.stderr for name in schedules.names())
    assert "for a schedule of your own, pass file.py:function" in result.stderr
    assert "Traceback" not in result.output


def test_a_schedule_without_chunks_refuses_them():
    result = run("show", "gpipe", "--chunks", 2)
    assert result.exit_code == 1
    assert "chunks_per_rank=2" in result.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("show",),
        ("show", "1f1b", "--ranks", "0"),
        ("show", "1f1b", "--microbatches", "-1"),
        ("show", "1f1b", "--forward", "-1"),
        ("show", "1f1b", "--ranks", "four"),
        ("show", "1f1b", "--nothing"),
        ("check", "no such file"),
        ("nothing",),
    ],
)
def test_wrong_usage_exits_with_2(args):
    result = run(*args)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr


def test_costs_that_are_no_numbers_are_an_error():
    result = run("show", "1f1b", "--forward", "nan")
    assert result.exit_code == 1
    assert "forward_s of stage 0 is nan" in result.stderr


def test_costs_of_zero_are_no_error():
    zeros = ["--forward", 0, "--input-grad", 0, "--weight-grad", 0]
    assert lines("show", "1f1b", *zeros)[4].startswith("1f1b: makespan 0 s, bubble 0.0%")


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
    for option in ("--png", "--chrome"):
        result = run("show", "1f1b", option, tmp_path / "missing" / "file")
        assert result.exit_code == 1
        assert "No such file or directory" in result.stderr


def test_check_says_ok(file):
    path = file(str(schedules.get("1f1b").program(3, 5)))
    want = "OK: 3 ranks, 3 stages, 5 micro-batches, bit-identical results, peak in flight per rank: 3 2 1"
    assert lines("check", path, "--max-in-flight", 3, "--exact") == [want]


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (WRONG_ORDER, [], "rank 1, position 0: 1B0 needs 1F0 before it on this rank, but 1F0 is at position 1"),
        (DEADLOCK, [], "deadlock: 2 of 2 ranks wait for each other in a cycle"),
        ("rank 0: 0X0", [], "line 1: an action must have the form <stage><kind><micro-batch>"),
        ("", [], "add 'microbatches N'"),
        (NOT_EXACT, ["--exact"], "in ascending micro-batch order"),
        ("microbatches 2\nrank 0: 0F0 0F1 0B0 0B1", ["--max-in-flight", 1], "but the limit is 1"),
        ("microbatches 2\nrank 0: 0F0 0B0 0F1", [], "Add 0B1."),
    ],
)
def test_check_finds_what_is_wrong(file, text, options, said):
    path = file(text)
    for result in (run("check", path, *options), run("check", "-", *options, text=text)):
        assert result.exit_code == 1
        assert result.stdout == ""
        assert said in result.stderr
        assert "Traceback" not in result.stderr
    assert f"Error: {path}: " in run("check", path, *options).stderr


def test_check_tells_what_is_not_exact():
    assert ", results not bit-identical, " in lines("check", "-", text=NOT_EXACT)[0]


def test_check_of_a_binary_file_is_an_error(tmp_path):
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00")
    for command in ("check", "show"):
        result = run(command, path)
        assert result.exit_code == 1
        assert "can't decode" in result.stderr


def test_compare_shows_all_schedules():
    header, *rows = lines("compare")
    assert header.split() == ["schedule", "makespan", "bubble", "above", "bound", "peak", "in", "flight"]
    assert [row.split()[0] for row in rows] == schedules.names(sliced=True)
    figures = {row.split()[0]: row.split()[1:] for row in rows}
    assert figures["1f1b"] == ["33", "s", "27.3%", "22.2%", "4"]
    assert figures["gpipe"] == ["33", "s", "27.3%", "22.2%", "8"]
    assert figures["zb-h1"] == ["27", "s", "11.1%", "0.0%", "4"]
    # two stages a rank, of which a micro-batch visits one
    assert figures["chimera"] == ["30", "s", "20.0%", "20.0%", "4"]
    assert figures["dualpipe"] == ["26", "s", "7.7%", "4.0%", "5"]
    assert figures["dualpipe-v"] == ["27", "s", "11.1%", "5.9%", "4.5"]
    # p + (p-1)/v micro-batches, and a bubble of (p-1)(F+B)/v
    assert figures["interleaved-1f1b"] == ["28.5", "s", "15.8%", "11.8%", "5.5"]
    assert len({len(row) for row in (header, *rows)}) == 1


def test_compare_takes_names_files_costs_and_shape(file):
    path = file(str(schedules.get("1f1b").program(2, 3)))
    rows = lines("compare", "gpipe", path, "--ranks", 2, "--microbatches", 2, "--forward", 10)
    assert [row.split() for row in rows[1:]] == [
        ["gpipe", "36", "s", "33.3%", "5.9%", "2"],
        [str(path), "48", "s", "25.0%", "4.3%", "2"],
    ]


def test_compare_names_the_file_that_is_wrong(file):
    result = run("compare", "1f1b", file(DEADLOCK, "wrong.txt"))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "wrong.txt: deadlock" in result.stderr


def test_compare_of_all_leaves_out_what_refuses_the_shape(monkeypatch):
    def gpipe_refuses(name, *shape):
        if name == "gpipe":
            raise ScheduleError("gpipe refuses 3 ranks")
        return schedules.get(name).program(4, 8)

    monkeypatch.setattr(cli, "_program", gpipe_refuses)
    result = run("compare")
    assert result.exit_code == 0
    assert result.stderr == "skipped gpipe: gpipe refuses 3 ranks\n"
    assert [row.split()[0] for row in result.stdout.splitlines()[1:]] == [
        name for name in schedules.names(sliced=True) if name != "gpipe"
    ]
    assert run("compare", "1f1b", "gpipe").exit_code == 1


def test_compare_draws(tmp_path):
    png = tmp_path / "compare.png"
    assert run("compare", "1f1b", "zb-h1", "--png", png).exit_code == 0
    assert png.read_bytes().startswith(b"\x89PNG")


def test_an_order_for_torch_in_a_folder_that_does_not_exist(tmp_path):
    result = run("export", "1f1b", "--torch", str(tmp_path / "none" / "order.csv"))
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: Could not open file")


COMMANDS = [
    "bound",
    "check",
    "checkpoint",
    "compare",
    "export",
    "fleet",
    "graph",
    "list",
    "report",
    "run",
    "show",
    "tune",
]


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_every_command_has_help_with_an_example(command):
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage:")
    example = result.stdout.partition("\n  Example")[2].splitlines()[1]
    assert example.startswith(f"    pipesched {' '.join(command)}")


def test_the_list_of_commands_says_in_a_line_what_each_does():
    rows = run("--help", text="").stdout.partition("Commands:\n")[2].splitlines()
    assert [row.split()[0] for row in rows] == COMMANDS
    assert all(row.endswith(".") and not row.endswith("...") for row in rows)


def test_the_command_prints_its_version():
    assert __version__ in lines("--version")[0]


def test_the_command_imports_neither_torch_nor_matplotlib():
    code = (
        "import sys, pipesched.cli.main\n"
        "pipesched.cli.main.main(['show', 'zb-h1', '--width', '120'], standalone_mode=False)\n"
        "print([name for name in ('torch', 'matplotlib', 'networkx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_it_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "pipesched", "list"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == lines("list")


def test_show_runs_steps_of_an_asynchronous_schedule_into_each_other():
    *_, headline, figures = lines("show", "pipedream", "--ranks", 2, "--microbatches", 2, "--steps", 3, "--width", 120)
    assert headline.startswith("pipedream: makespan 21 s")
    assert figures.endswith("peak in flight per rank: 2 1; weight versions per stage: 2 1")
    assert "steps=2 was passed; pass steps=1" in run("show", "1f1b", "--steps", 2).stderr


def test_show_counts_a_slice_as_its_share():
    assert "makespan 13.5 s" in lines("show", "seq1f1b", "--ranks", 2, "--microbatches", 4)[2]


def test_tune_divides_ranks_into_replicas(tmp_path):
    profile([1e-3] * 4, (1, 2)).save(tmp_path / "profile.json")
    result = run("tune", tmp_path / "profile.json", "--ranks", 4, "--batch", 8, "--replicas", 2, "--zero", 2)
    assert "2 replicas of 2 ranks (dp 2 x pp 2, zero 2)" in result.stdout
    assert "the plan uses" not in result.stdout
    refused = run("tune", tmp_path / "profile.json", "--batch", 8, "--replicas", "many")
    assert "'many' is not a number of replicas; pass a whole number of at least 1, or auto" in refused.stderr


SPLITTABLE = """
import torch
from torch import nn


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def make():
    return nn.Sequential(Perceptron(), Perceptron()), torch.randn(4, 64)
"""


def test_tune_measures_which_layers_of_a_model_can_be_split(file):
    script = file(SPLITTABLE, "splittable.py")
    # more ranks than layers, and one replica: layers must be split
    command = ["tune", f"{script}:make", "--ranks", 4, "--batch", 4, "--replicas", 1, "--tensor", 2]
    result = run(*command, "--tensor-parallel", "*.up=column,*.down=row")
    assert "(dp 1 x pp 2 x tp 2)" in result.stdout
    assert "pass tensor_parallel='auto', or a dict of your layers' names" in run(*command).stderr
    wrong = run(*command, "--tensor-parallel", "column")
    assert "'column' is not a list of names and styles of layers" in wrong.stderr
    profile([1e-3] * 4, (1, 2)).save(script.parent / "profile.json")
    saved = run("tune", script.parent / "profile.json", "--batch", 8, "--tensor-parallel", "auto")
    assert "--tensor-parallel goes with file.py:function only" in saved.stderr


def test_bound_prints_the_bound_the_best_known_and_the_gap(file):
    costs = Costs((25, 23, 15), (28, 27, 15), (22, 16, 11), (50, 42, 24), transfer_s=1)
    path = file(json.dumps(costs.to_dict()), "costs.json")
    best = path.parent / "best.txt"
    found = lines("bound", "--costs", path, "--max-in-flight", 2, "-o", best)
    assert found[0] == "3 stages on 3 ranks, 8 micro-batches, at most 2 in flight per rank"
    assert found[1].split()[:2] == ["bound", "711"]
    assert "above the bound" in found[2]
    assert Program.parse(best.read_text()).num_microbatches == 8
    assert lines("bound", "--placement", "0,1,1,0", "--microbatches", 3)[0] == "4 stages on 2 ranks, 3 micro-batches"


def test_bound_says_what_is_wrong_and_needs_the_extra_for_a_proof(monkeypatch):
    assert "--placement must list the rank of each stage" in run("bound", "--placement", "0,x").output
    assert "the bound ignores links" in run("bound", "--output-bytes", 5).output
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    assert "pip install 'pipesched[solver]'" in run("bound", "--prove").output
