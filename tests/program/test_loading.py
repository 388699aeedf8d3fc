"""Programs from files: text, and the tables of torch.distributed.pipelining."""

import pytest

from pipesched import Program, load_program, schedules, validate
from pipesched.errors import ScheduleError
from tests.support.random_programs import fitting


@pytest.fixture
def file(tmp_path):
    def write(text, name="mine.csv"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def table(program):
    return "".join(",".join(map(str, order)) + "\n" for order in program.orders)


@pytest.mark.parametrize("name", schedules.names())
def test_a_program_comes_back_from_a_text_file(file, name):
    program = schedules.get(name).program(fitting(name, 3), 4)
    loaded = load_program(file(str(program), f"{name}.txt"))
    assert loaded == program
    assert loaded.name == name
    validate(loaded, exact=program.exact)


@pytest.mark.parametrize("name", [name for name in schedules.names() if schedules.get(name).num_chains == 1])
def test_the_orders_come_back_from_a_table(file, name):
    """All that a table tells: no overlaps, no versions, no shared weights."""
    program = schedules.get(name).program(3, 4)
    loaded = load_program(file(table(program), f"{name}.csv"))
    assert loaded.orders == tuple(program.orders)
    assert (loaded.placement, loaded.num_microbatches, loaded.name) == (program.placement, 4, name)
    validate(loaded, exact=True)


def test_idle_cells_spaces_quotes_and_empty_lines_do_not_count(file):
    text = '\ufeff0F0, ,0B0,\r\n\r\n"",1F0 ,"1I0",1W0\r\n\r\n'
    loaded = load_program(str(file(text, "Mine.CSV")))
    assert str(loaded) == "name Mine\nmicrobatches 1\nplacement 0 1\nrank 0: 0F0 0B0\nrank 1: 1F0 1I0 1W0\n"


def test_a_row_of_idle_cells_is_a_rank_without_stages(file):
    loaded = load_program(file("0F0,0B0\n,\n1F0,1B0\n"))
    assert loaded.placement == (0, 2)
    assert loaded.num_ranks == 3


def test_long_names_are_understood(file):
    long = load_program(file("0FORWARD0,0FULL_BACKWARD0,0FORWARD1,0BACKWARD_INPUT1,0BACKWARD_WEIGHT1\n"))
    assert long == load_program(file("0F0,0B0,0F1,0I1,0W1\n"))


def test_forwards_alone_make_a_program_that_is_forward_only(file):
    loaded = load_program(file("0F0,0F1\n1F0,1F1\n"))
    assert loaded.forward_only
    validate(loaded)


def test_a_text_without_a_name_is_named_as_its_file(file):
    loaded = load_program(file("# mine\nmicrobatches 1\nrank 0: 0F0 0B0\n", "by hand.txt"))
    assert loaded.name == "by hand"
    assert load_program(file(str(loaded), "other.txt")).name == "by hand"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "0F0,0B0\n1F0,1X0\n",
            "row 2, column 2: a cell must be empty or <stage><kind><micro-batch>, such .*; got '1X0'",
        ),
        ("0F0;0B0\n", "row 1, column 1: a cell must be empty or .*; got '0F0;0B0'"),
        ("0F0,0B\n", "row 1, column 2: a cell must be empty or .*; got '0B'"),
        (
            "\n0F0,0SEND_F0\n",
            "row 2, column 2: a cell must not contain a communication or sharding action; got '0SEND_F0'; leave out",
        ),
        ("0F0,0SEND_F0>1\n", "column 2: a cell must not contain a communication or sharding action; got '0SEND_F0>1'"),
        (
            "0UNSHARD,0F0,0B0,0REDUCE_GRAD\n",
            "row 1, column 1: a cell must not contain a communication or sharding action; got '0UNSHARD'",
        ),
        (
            "0F0,(0F1;0B0)OVERLAP_F_B\n",
            r"row 1, column 2: a cell must not contain two actions that run at once; got '\(0F1;0B0\)",
        ),
        (
            "0F0,0B0\n1F0,0F1\n",
            "row 2, column 2: a stage must be on one rank, .* 0F1 belongs to stage 0, "
            "as does the action in row 1, column 1",
        ),
        (
            "0F0,0B0\n2F0,2B0\n",
            "row 2, column 1: stages must be numbered from 0 .*; this action belongs to stage 2, but no",
        ),
        ("", "at least one action"),
        (",,\n", "at least one action"),
        ("0F0,0B0\x00\n", "row 1, column 2"),
    ],
)
def test_what_is_wrong_is_named_with_file_row_and_column(file, text, said):
    path = file(text)
    with pytest.raises(ScheduleError, match=said) as caught:
        load_program(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_errors_of_the_text_form_name_the_file_and_the_line(file):
    path = file("microbatches 1\nrank 0: 0F0 0X0\n", "wrong.txt")
    with pytest.raises(ScheduleError, match="line 2: an action must have the form") as caught:
        load_program(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_file_that_is_no_text_or_not_there(tmp_path):
    path = tmp_path / "binary.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScheduleError, match=r"binary.csv: .*can't decode"):
        load_program(path)
    with pytest.raises(FileNotFoundError, match=r"missing\.csv"):
        load_program(tmp_path / "missing.csv")


# What ScheduleInterleavedZeroBubble._dump_csv of PyTorch 2.13 wrote for 2 ranks, 4 stages, 4 micro-batches.
TORCH = """\
0F0,0F1,2F0,,2F1,2I0,2W0,0F2,2I1,2W1,0F3,0I0,0W0,2F2,0I1,0W1,2F3,2I2,2W2,2I3,2W3,0I2,0W2,0I3,0W3
,1F0,1F1,3F0,3I0,3F1,3I1,3W0,1F2,1I0,3W1,1F3,1I1,1W0,3F2,3I2,1W1,3F3,3I3,3W2,1I2,3W3,1I3,1W2,1W3
"""


def test_what_torch_writes_is_the_program_that_we_build(file):
    assert load_program(file(TORCH)) == schedules.get("interleaved-zb").program(2, 4)


def test_own_kinds_that_compute_are_read(file):
    loaded = load_program(file("0F0,0R0,0B0\n"))
    assert loaded == Program.parse("microbatches 1\nrank 0: 0F0 0R0 0B0")
