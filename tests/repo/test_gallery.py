"""The gallery shows what the schedules are, and `make check` finds where it does not."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.dom import minidom

import pytest

from pipesched import schedules
from pipesched.errors import ScheduleError
from pipesched.order import Order, schedule, v
from pipesched.simulation.simulator import simulate

ROOT = Path(__file__).parents[2]
FEW = ("__init__.py", "gpipe.py", "one_f_one_b.py", "pipedream.py")
NEW = '''"""Mine: as GPipe (Nobody et al. 2030, arXiv:3001.00001)."""

from pipesched.order import Order, Shape, schedule


@schedule("mine")
def mine(rank: int, shape: Shape, *, reach: int = 2) -> Order:
    """Each <b> * by itself. Nobody et al. 2030."""
    order = Order(shape)
    for _ in range(shape.num_microbatches):  # one by one
        order.F(rank)

        order.B(rank)
    return order
'''


def loaded():
    spec = importlib.util.spec_from_file_location("gallery", ROOT / "docs/gallery.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("gallery", module)
    spec.loader.exec_module(module)
    return module


gallery = loaded()


def run(tree, *words, **environment):
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "", **environment}
    command = [sys.executable, "docs/gallery.py", *words]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tree with a few schedules, their gallery and the compiled modules, which its copies keep."""
    tree = tmp_path_factory.mktemp("gallery")
    for name in ("pipesched", "viz"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    recorded = ("docs/report/plan.json", "docs/report/trace.json")
    for name in ("docs/gallery.py", *recorded, *(f"schedules/{name}" for name in FEW)):
        (tree / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    result = run(tree)
    assert result.returncode == 0, result.stdout + result.stderr
    return tree


@pytest.fixture
def tree(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "tree", symlinks=True))


def change(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.exhaustive
def test_the_gallery_is_the_same_wherever_it_is_drawn(tree):
    (tree / "matplotlibrc").write_text("font.size: 20\nsvg.fonttype: none\naxes.facecolor: red\n")
    result = run(tree, "--check", PYTHONHASHSEED="7", SOURCE_DATE_EPOCH="0")
    assert result.returncode == 0, result.stdout + result.stderr


def spoil_what_was_made(tree):
    change(tree / "docs/schedules.md", "27.3 %", "27.2 %")
    change(tree / "docs/schedules/1f1b.svg", "#56b4e9", "#56b4e8")
    (tree / "docs/schedules/gpipe.svg").unlink()
    (tree / "docs/schedules/old.svg").write_text("")


def name_another_paper_and_colour(tree):
    change(tree / "schedules/gpipe.py", "Huang", "Hwang")
    change(tree / "viz/colours.py", "#e69f00", "#e69f01")


PLANTED = {
    "a figure, a picture, one gone, one too many": (
        spoil_what_was_made,
        ["schedules.md", "schedules/1f1b.svg", "schedules/gpipe.svg", "schedules/old.svg"],
    ),
    "another paper, another colour": (
        name_another_paper_and_colour,
        ["schedules.md", "schedules/1f1b.svg", "schedules/gpipe.svg", "schedules/pipedream.svg"],
    ),
    "another order": (
        lambda tree: change(tree / "schedules/one_f_one_b.py", "num_ranks - 1 - rank", "num_ranks - rank"),
        ["schedules.md", "schedules/1f1b.svg"],
    ),
    "a new schedule": (
        lambda tree: (tree / "schedules/mine.py").write_text(NEW, encoding="utf-8"),
        ["schedules.md", "schedules/mine.svg"],
    ),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("what", PLANTED)
def test_check_names_gallery_files_that_are_out_of_date(tree, what):
    plant, names = PLANTED[what]
    plant(tree)
    result = run(tree, "--check")
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"out of date: {', '.join(f'docs/{name}' for name in names)} (" in result.stderr
    assert "run `make gallery`" in result.stderr


def test_make_check_runs_it():
    assert "\t$(BIN)/python docs/gallery.py --check\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.exhaustive
def test_a_new_schedule_appears_by_itself_and_an_old_picture_goes(tree):
    (tree / "schedules/mine.py").write_text(NEW, encoding="utf-8")
    (tree / "docs/schedules/old.svg").write_text("")
    assert sorted(run(tree).stdout.splitlines()) == [
        "removed docs/schedules/old.svg",
        "wrote docs/schedules.md",
        "wrote docs/schedules/mine.svg",
    ]
    page = (tree / "docs/schedules.md").read_text(encoding="utf-8")
    section = page[page.index("## mine\n") :].partition("\n## ")[0]
    assert "Mine: as GPipe (Nobody et al. 2030, [arXiv:3001.00001](https://arxiv.org/abs/3001.00001))." in section
    assert "\nEach \\<b> \\* by itself.\n" in section
    assert "(schedules/mine.svg)" in section
    assert "| options | `reach=2` |" in section
    assert "| lines of code | 8, [schedules/mine.py](../schedules/mine.py) |" in section
    assert "| [Nobody et al. 2030](https://arxiv.org/abs/3001.00001) |" in page


def test_the_committed_page_shows_every_schedule_with_its_picture():
    page = (ROOT / "docs/schedules.md").read_text(encoding="utf-8")
    own = [
        name for name in schedules.names(sliced=True) if schedules.get(name).module.startswith("pipesched.schedules.")
    ]
    assert sorted(re.findall(r"^## (\S+)$", page, re.MULTILINE)) == own
    for name in own:
        assert f"](schedules/{name}.svg)" in page
        minidom.parse(str(ROOT / f"docs/schedules/{name}.svg"))
    for target in re.findall(r"\]\(([^)#]+)\)", page):
        assert target.startswith("https://") or (ROOT / "docs" / target).exists(), target


def test_a_rank_with_two_copies_of_shared_weights_works_on_one_of_them_for_a_micro_batch():
    @schedule("both-ways", placement=v, num_chains=2)
    def both_ways(rank, shape):
        order = Order(shape)
        for add in (order.F, order.B):
            for stage in shape.chunks(rank):
                for _ in range(shape.num_microbatches):
                    add(stage)
        return order

    one = gallery.Exhibit(both_ways, both_ways.program(4, 8))
    assert simulate(one.program, gallery.unit_costs(one.program)).busy_s == (24,) * 4
    assert one.held == [8] * 4
    assert gallery.above(one) == gallery.percent(one.trace.above_bound)


def test_a_schedule_that_refuses_the_shape_is_shown_in_the_nearest_one():
    @schedule("odd")
    def odd(rank, shape):
        if shape.num_ranks % 3 or shape.num_microbatches % 5:
            raise ScheduleError("no")
        order = Order(shape)
        for _ in range(shape.num_microbatches):
            order.F(rank)
            order.B(rank)
        return order

    one = gallery.Exhibit(odd, gallery.nearest(odd))
    assert one.shape == (3, 10)
    assert gallery.caption(one) == "3 ranks, 10 micro-batches, the valid shape nearest to 4 ranks and 8 micro-batches"
