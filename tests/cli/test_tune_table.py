"""`pipesched tune --table`: one command from a table of layers to a plan, a picture and an explanation."""

import json

import pytest
from click.testing import CliRunner

import pipesched
from pipesched.cli.main import main
from pipesched.planning.plan import Plan

HEAD = "name,forward_ms,backward_ms,parameter_bytes,output_bytes,activation_bytes\n"
ROWS = "".join(f"block{at},9,18,4e6,1e5,3e6\n" for at in range(8))


def run(*args):
    return CliRunner().invoke(main, ["tune", *(str(arg) for arg in args)])


@pytest.fixture
def layers(tmp_path):
    path = tmp_path / "layers.csv"
    path.write_text(HEAD + ROWS)
    return path


def options(*others):
    return "--rows", 4, "--batch", 32, "--ranks", 2, "--schedule", "1f1b", "--microbatches", 8, *others


def test_a_table_becomes_a_plan_a_picture_and_an_explanation(layers, tmp_path):
    links = pipesched.Links.of_hosts(1, 2, inside=pipesched.Link(1e-5, 1e11), between=pipesched.Link(1e-5, 1e9))
    (tmp_path / "links.json").write_text(json.dumps(links.to_dict()))
    files = [tmp_path / f"plan.{ending}" for ending in ("json", "png", "html")]
    done = run(
        *("--table", layers, *options("--links", tmp_path / "links.json", "--memory-limit", "80MB")),
        *(part for path in files for part in ("-o", path)),
    )
    assert done.exit_code == 0, done.output
    assert "the optimizer keeps 8 B for each parameter (adam)" in done.stdout
    profile = pipesched.Profile.from_table(layers, rows=4)
    asked = {"num_ranks": 2, "batch_size": 32, "schedule": "1f1b", "num_microbatches": 8, "links": links}
    plan = pipesched.tune_profile(profile, memory_limit_bytes=80 * 10**6, **asked)
    assert Plan.load(files[0]).to_dict() == plan.to_dict()
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert "<html" in files[2].read_text()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("optimizer", "size"), [("sgd", 0), ("adamw", 8), ("12", 12), ("0.5", 0.5)])
def test_the_optimizer_is_a_name_or_a_number(layers, tmp_path, optimizer, size):
    plan = tmp_path / "plan.json"
    done = run("--table", layers, *options("--optimizer", optimizer, "-o", plan))
    assert done.exit_code == 0, done.output
    assert sum(one.optimizer for one in Plan.load(plan).memory()) == 8 * 10**6 * size
    assert "the optimizer keeps" not in done.stdout


def test_a_column_rows_is_enough(layers):
    layers.write_text(HEAD.replace("\n", ",rows\n") + ROWS.replace("\n", ",4\n"))
    assert run("--table", layers, *options()[2:]).exit_code == 0
    assert "has the rows 4, but rows=2 was passed" in run("--table", layers, "--batch", 64, "--rows", 2).output


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--table", "{layers}", "model.py:make", "--batch", 8], "got both; pass one of them"),
        (["--batch", 8], "got neither; pass one of them"),
        (["model.py:make", "--rows", 4, "--batch", 8], "got --rows without --table; leave --rows out"),
        (["--table", "{layers}", "--confirm", 3, "--batch", 8], "got --confirm without MODEL; leave --confirm out"),
        (["--table", "{folder}", "--batch", 8], "is a directory"),
        (["--table", "no.csv", "--batch", 8], "does not exist"),
        (["--table", "{layers}", "--rows", 0, "--batch", 8], "0 is not in the range x>=1"),
        (["--table", "{layers}", "--optimizer", "adamax", "--batch", 8], "sgd, momentum, adam, adamw"),
        (["--table", "{layers}", "--optimizer", "1x", "--batch", 8], "sgd, momentum, adam, adamw"),
        (["--table", "{layers}", "--memory-limit", "1e400", "--batch", 8], "'1e400' is not a number of bytes"),
        (["--table", "{layers}", "-o", "plan.xyz", "--batch", 8], "got 'plan.xyz'; change the suffix"),
    ],
)
def test_options_that_do_not_go_together_are_named(layers, tmp_path, args, said):
    done = run(*(str(arg).format(layers=layers, folder=tmp_path) for arg in args))
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())


def test_all_problems_of_a_table_are_named_at_once(layers):
    layers.write_text(HEAD.replace("output_bytes", "output") + "a,fast,2,4,1,1\n")
    done = run("--table", layers, "--batch", 8)
    assert done.exit_code == 1
    text = " ".join(done.stderr.split())
    for said in ("layers.csv", "the forward_ms 'fast'", "unknown column 'output'", "no column output_bytes, rows"):
        assert said in text
    assert "docs/howto/tables.md" in text
