"""Tables for torch's runtime: a table is read back as the same program; an error names what torch cannot express."""

from dataclasses import replace

import pytest
from click.testing import CliRunner

from pipesched import Program, load_program, schedules
from pipesched.cli.main import main
from pipesched.errors import ScheduleError
from pipesched.program.dependencies import StageGraph


def program(name, ranks=2, microbatches=4):
    return schedules.get(name).program(ranks, microbatches)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "searched"])
def test_a_table_is_read_back(name, tmp_path):
    own = program(name)
    own.to_torch(tmp_path / "order.csv")
    assert load_program(tmp_path / "order.csv") == own


REFUSED = {
    "pairs of actions that overlap": lambda: program("dualpipe-v"),
    "versions of weights": lambda: replace(program("1f1b"), versions=((0, 0, 0, 1), (0, 0, 0, 1))),
    "several chains": lambda: program("chimera"),
    "token slices": lambda: replace(program("1f1b"), slices_per_microbatch=2),
    "other actions (8 UPDATE)": lambda: program("pipedream"),
    "other actions (4 R)": lambda: Program.parse(
        "microbatches 4\nplacement 0\nrank 0: 0F0 0R0 0B0 0F1 0R1 0B1 0F2 0R2 0B2 0F3 0R3 0B3"
    ),
    "edges that skip stages": lambda: replace(program("1f1b", 3), graph=StageGraph.of(3, [(0, 1), (1, 2), (0, 2)])),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_torch_cannot_express_is_refused_by_name(what, tmp_path):
    with pytest.raises(ScheduleError) as caught:
        REFUSED[what]().to_torch(tmp_path / "order.csv")
    assert what in str(caught.value)
    assert not (tmp_path / "order.csv").exists()


def test_the_command_exports_schedules_and_files(tmp_path):
    def run(*words):
        return CliRunner().invoke(main, ["export", *map(str, words)])

    ran = run("zb-h1", "--ranks", 2, "--microbatches", 4, "--torch", tmp_path / "order.csv")
    assert ran.output == f"wrote {tmp_path / 'order.csv'}\n{tmp_path / 'order.csv'}: 2 ranks, 24 actions\n"
    assert load_program(tmp_path / "order.csv") == program("zb-h1")
    (tmp_path / "mine.txt").write_text(str(program("gpipe")))
    assert not run(tmp_path / "mine.txt", "--torch", tmp_path / "other.csv").exit_code
    assert load_program(tmp_path / "other.csv") == program("gpipe")
    refused = run("pipedream", "--torch", tmp_path / "none.csv")
    assert refused.exit_code == 1
    assert "choose a synchronous schedule, such as 1f1b" in refused.output
