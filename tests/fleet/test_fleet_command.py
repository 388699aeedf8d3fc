"""The command `pipesched fleet`."""

import json

import pytest
from click.testing import CliRunner

from pipesched.cli.main import main
from pipesched.fleet import POLICIES
from tests.fleet.small_fleet import profile


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    profile().save("profile.json")
    (tmp_path / "trace.csv").write_text("time_s,rank,event\n1000,3,down\n2000,3,up\n3000,0,down\n")


def run(*args):
    return CliRunner().invoke(main, ["fleet", *map(str, args)])


COMMON = ("--profile", "profile.json", "--batch", 32, "--memory-limit", "18GB", "--effort", 1000)


@pytest.mark.usefixtures("files")
def test_a_trace_is_replayed_and_drawn(tmp_path):
    ran = run("trace.csv", *COMMON, "--until", 4000, "-o", "fleet.png", "-o", "fleet.json", "--restart", 60)
    assert ran.exit_code == 0, ran.output
    lines = ran.stdout.splitlines()
    assert lines[0] == "trace: 4 ranks, 1.11 h, 2 losses in 2 moments, 1 return"
    assert [line.split()[0] for line in lines[2:6]] == list(POLICIES)
    assert (tmp_path / "fleet.png").read_bytes().startswith(b"\x89PNG")
    policies = {own["policy"]: own for own in json.loads((tmp_path / "fleet.json").read_text())["policies"]}
    assert policies["checkpoint-restart"]["seconds"]["restart"] % 60 < 20  # with the time of a checkpoint


@pytest.mark.usefixtures("files")
def test_a_family_and_a_policy_are_chosen():
    ran = run("--family", "single", "--ranks", 4, *COMMON, "--policy", "elastic")
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.startswith("single, seed 0: 4 ranks, 24 h, ")
    assert [name for name in POLICIES if name in ran.stdout] == ["elastic"]


@pytest.mark.usefixtures("files")
def test_a_table_of_layers_is_a_profile(tmp_path):
    (tmp_path / "layers.csv").write_text(
        "name,forward_ms,backward_ms,parameter_bytes,output_bytes,activation_bytes\na,1,2,4,4,4\nb,1,2,4,4,4\n"
    )
    common = ("--profile", "layers.csv", "--rows", 1, "--batch", 8, "--effort", 1000)
    ran = run("trace.csv", *common, "--policy", "elastic")
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.splitlines()[2].split()[0] == "elastic"


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "fleet needs TRACE, or --family with a name; got neither; pass one of them"),
        (["trace.csv", "--family", "spot"], "got both; pass one of them"),
        (["--family", "storm"], "got 'storm'; choose one of them"),
        (["trace.csv", "--ranks", 3], "trace.csv, line 2 has rank 3; correct the rank"),
        (["trace.csv", "--restart", "-1"], "restart_s must be a number, not negative; got -1.0; correct it"),
        (["trace.csv", "--policy", "magic"], "got 'magic'; choose from them"),
    ],
)
def test_an_error_is_one_message(args, message):
    ran = run(*args, *COMMON)
    assert ran.exit_code != 0
    assert message in ran.stderr
