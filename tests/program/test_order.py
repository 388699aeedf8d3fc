import subprocess
import sys
from textwrap import dedent

import pytest

from pipesched import Schedule, schedules, validate
from pipesched.errors import ScheduleError
from pipesched.order import Order, Shape, linear, loop, schedule, v


@schedule("depth-first", placement=v, chunks_per_rank=2)
def depth_first(rank: int, shape: Shape, *, split: bool = False) -> Order:
    """One micro-batch at a time.

    Second paragraph.
    """
    order = Order(shape)
    for _ in range(shape.num_microbatches):
        for stage in shape.chunks(rank):
            order.F(stage)
        for stage in reversed(shape.chunks(rank)):
            if split:
                order.I(stage)
                order.W(stage)
            else:
                order.B(stage)
    return order


def text(program):
    return [" ".join(map(str, order)) for order in program.orders]


def test_an_own_schedule_makes_valid_programs():
    program = depth_first.program(2, 2)
    validate(program, max_in_flight=2, exact=True)
    assert program.name == "depth-first"
    assert program.placement == (0, 1, 1, 0)
    assert text(program) == ["0F0 3F0 3B0 0B0 0F1 3F1 3B1 0B1", "1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1"]


def test_microbatches_number_themselves_and_asking_for_more_adds_nothing():
    order = Order(Shape(num_ranks=1, num_microbatches=2, chunks_per_rank=2, placement=(0, 0)))
    for _ in range(5):
        order.F(0)
    order.F(1)
    order.B(1)
    assert [str(action) for action in order.actions] == ["0F0", "0F1", "1F0", "1B0"]


def test_a_shape_knows_its_stages():
    shape = Shape(2, 4, 2, (0, 1, 1, 0))
    assert shape.num_stages == 4
    assert shape.chunks(0) == (0, 3)


def test_options_are_the_keyword_only_parameters_and_the_chunks():
    assert depth_first.options == {"chunks_per_rank": 2, "split": False}
    assert text(depth_first.program(1, 1, split=True, chunks_per_rank=1)) == ["0F0 0I0 0W0"]


def test_with_options_changes_defaults_of_a_copy():
    three = depth_first.with_options(chunks_per_rank=3)
    assert three.chunks_per_rank == 3
    assert three.program(2, 1).num_stages == 6
    assert three.program(2, 1, chunks_per_rank=1).num_stages == 2
    assert depth_first.chunks_per_rank == 2


@pytest.mark.parametrize("ask", [Schedule.with_options, lambda plan, **options: plan.program(2, 2, **options)])
def test_an_unknown_option_is_refused_with_the_known_ones(ask):
    with pytest.raises(
        ScheduleError, match=r"'depth-first' takes only the options chunks_per_rank, split; got waves=2"
    ):
        ask(depth_first, waves=2)
    with pytest.raises(ScheduleError, match=r"'gpipe' takes no options; got chunks_per_rank=2; leave it out"):
        ask(schedules.get("gpipe"), chunks_per_rank=2)


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "says"),
    [(4, 10**9, r"4,000,000,000 for 4 ranks, 1,000,000,000 micro-"), (10**9, 1, r"1,000,000,000 for 1,000,000,000 ra")],
)
def test_a_program_that_no_memory_holds_is_refused_before_it_is_made(num_ranks, num_microbatches, says):
    with pytest.raises(ScheduleError, match=rf"at most 100,000,000 pairs of .*; '1f1b' has {says}.*; use fewer m"):
        schedules.get("1f1b").program(num_ranks, num_microbatches)


@pytest.mark.parametrize("count", [0, -1, 2.0, "2", None])
def test_counts_are_whole_numbers_from_1(count):
    with pytest.raises(ScheduleError, match=f"whole number of ranks, at least 1; got {count!r}"):
        depth_first.program(count, 1)
    with pytest.raises(ScheduleError, match=f"whole number of micro-batches, at least 1; got {count!r}"):
        depth_first.program(1, count)


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", None])
def test_chunks_are_whole_numbers_from_1(count):
    with pytest.raises(ScheduleError, match=f"whole number of chunks per rank, at least 1; got {count!r}"):
        depth_first.program(1, 1, chunks_per_rank=count)


@pytest.mark.parametrize(
    ("rule", "placement"),
    [(linear, (0, 0, 1, 1)), (loop, (0, 1, 0, 1)), (v, (0, 1, 1, 0)), (lambda p, c: (1, 0), (1, 0))],
)
def test_the_placement_rule_lays_out_the_stages(rule, placement):
    plan = schedule("any", placement=rule, chunks_per_rank=2)(depth_first.function)
    assert plan.program(2, 1).placement == placement


def test_without_chunks_a_rank_holds_one_stage():
    @schedule("plain")
    def plain(rank, shape):
        assert shape.chunks(rank) == (rank,)
        order = Order(shape)
        order.F(rank)
        return order

    assert plain.chunks_per_rank == 1
    assert plain.program(3, 1).placement == (0, 1, 2)


def test_a_schedule_knows_its_words_and_its_module():
    assert depth_first.description.startswith("One micro-batch at a time.\n\nSecond")
    assert depth_first.module == __name__


def test_names_are_sorted_and_get_finds_each():
    names = schedules.names()
    assert names == sorted(names)
    assert {"gpipe", "1f1b", "interleaved-1f1b", "zb-h1"} <= set(names)
    for name in names:
        assert isinstance(schedules.get(name), Schedule)
        assert schedules.get(name).name == name
        assert schedules.get(name).description


@pytest.mark.parametrize("name", ["1F1B", "ZB-V", "GPipe", "Interleaved-1f1b"])
def test_names_are_found_in_any_case(name):
    assert schedules.get(name) is schedules.get(name.lower())
    assert schedules.get(name).program(2, 4).name == name.lower()


def test_an_unknown_name_in_capitals_is_refused_with_the_nearest_one():
    with pytest.raises(ScheduleError, match=r"got 'ZBV'; choose one of: .*; the nearest is 'zb-v'$"):
        schedules.get("ZBV")


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ScheduleError, match=r"got '1b1f'; choose one of: .*1f1b, .*gpipe, .*interleaved-1f1b, .*zb-h1"):
        schedules.get("1b1f")


def found_with(folder, **modules):
    """Run ``names()`` in a fresh process with more modules lying among the schedules."""
    for module, name in modules.items():
        source = f"""
            from pipesched.order import Order, Shape, schedule

            @schedule({name!r})
            def made(rank: int, shape: Shape) -> Order:
                return Order(shape)
        """
        (folder / f"{module}.py").write_text(dedent(source))
    code = f"import pipesched.schedules as s; s.__path__.append({str(folder)!r}); print(*s.names())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_a_module_that_lies_among_the_schedules_is_found_by_itself(tmp_path):
    assert "added" in found_with(tmp_path, mine="added").stdout.split()


def test_two_modules_with_one_name_are_refused_by_both_their_names(tmp_path):
    error = found_with(tmp_path, mine="gpipe").stderr
    assert "ScheduleError" in error
    assert "'gpipe' of pipesched.schedules.mine is already used by pipesched.schedules.gpipe" in error


def test_a_schedule_whose_name_is_in_capitals_is_found_and_listed_as_it_is_written(tmp_path):
    assert "Our-Schedule" in found_with(tmp_path, ours="Our-Schedule").stdout.split()


def test_names_that_differ_in_case_alone_are_refused(tmp_path):
    error = found_with(tmp_path, mine="GPipe").stderr
    assert "schedule names must be unique (case is ignored)" in error
    assert "'GPipe' of pipesched.schedules.mine is already used by pipesched.schedules.gpipe; rename one" in error


ENTRY = """
from pipesched import Order, schedule

@schedule("from-a-package")
def made(rank, shape):
    order = Order(shape)
    for _ in range(shape.num_microbatches):
        order.F(rank)
        order.B(rank)
    return order
"""


def names_with_package(folder, value, source=ENTRY):
    """Run ``names()`` in a fresh process where a package with an entry point is installed."""
    (folder / "their_schedules.py").write_text(source)
    info = folder / "theirs-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[pipesched.schedules]\nmine = {value}\n")
    code = f"import sys; sys.path.append({str(folder)!r}); from pipesched import schedules as s; print(*s.names())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("value", ["their_schedules", "their_schedules:made"])
def test_schedules_of_installed_packages_are_found_by_their_entry_point(tmp_path, value):
    ran = names_with_package(tmp_path, value)
    assert ran.stdout.split() == sorted([*schedules.names(), "from-a-package"]), ran.stderr


@pytest.mark.parametrize(
    ("value", "source", "said"),
    [
        (
            "their_schedules",
            ENTRY.replace("from-a-package", "gpipe"),
            "'gpipe' of their_schedules is already used by pipesched.schedules.gpipe; rename one",
        ),
        (
            "their_schedules",
            "import no_such_module",
            "'mine = their_schedules' of theirs 1.2 raises ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("their_schedules:gone", ENTRY, "'mine = their_schedules:gone' of theirs 1.2 raises AttributeError"),
        ("their_schedules", "", "a module with Schedules; 'mine = their_schedules' of theirs 1.2 is <module"),
        ("their_schedules:made.name", ENTRY, "'mine = their_schedules:made.name' of theirs 1.2 is 'from-a-package'"),
    ],
)
def test_a_package_that_is_wrong_is_named(tmp_path, value, source, said):
    error = names_with_package(tmp_path, value, source).stderr.splitlines()[-1]
    assert error.startswith("pipesched.errors.ScheduleError: ")
    assert said in error


@pytest.mark.parametrize("stage", [-1, 2, 0.0, None])
def test_a_stage_is_one_of_the_programs(stage):
    @schedule("lost")
    def lost(rank, shape):
        order = Order(shape)
        order.F(stage)
        return order

    with pytest.raises(ScheduleError, match=r"stages 0\.\.1; got .*; take a stage from shape.chunks"):
        lost.program(2, 2)


@pytest.mark.parametrize("returned", [None, 3])
def test_a_schedule_returns_its_order(returned):
    with pytest.raises(ScheduleError, match=r"'forgets' returned .*; end the function with 'return order'"):
        schedule("forgets")(lambda rank, shape: returned).program(2, 2)
    with pytest.raises(ScheduleError, match="for each of 2 ranks; 'few' returned 1 Order;"):
        schedule("few")(lambda shape: [Order(shape)]).program(2, 2)
