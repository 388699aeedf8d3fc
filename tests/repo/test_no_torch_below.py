import pkgutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

import pipesched

CONTRACTS = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8"))["tool"][
    "importlinter"
]["contracts"]


def core():
    """Every module that the contract keeps free of torch, those within packages included."""
    (contract,) = [one for one in CONTRACTS if one["name"] == "The core imports no torch"]
    for name in contract["source_modules"]:
        yield name
        places = find_spec(name).submodule_search_locations
        yield from (module.name for module in pkgutil.walk_packages(places or [], f"{name}."))


def run(code):
    """What a fresh process prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_the_core_imports_no_torch():
    code = f"""
import importlib, sys
for name in {list(core())}:
    importlib.import_module(name)
    if "torch" in sys.modules:
        print(name)
        break
"""
    assert run(code) == []


def test_a_schedule_is_built_checked_and_simulated_without_torch_networkx_or_matplotlib():
    code = """
import sys, pipesched
program = pipesched.schedules.get("1f1b").program(4, 8)
pipesched.validate(program)
print(pipesched.simulate(pipesched.lower(program), pipesched.Costs.uniform(4)).makespan_s)
print(*sorted({"torch", "matplotlib", "networkx"} & set(sys.modules)))
"""
    assert run(code) == ["33"]


def test_a_table_becomes_a_plan_a_picture_and_a_report_where_torch_cannot_be_imported(tmp_path):
    code = f"""
import os, sys
sys.modules["torch"] = None  # every import of torch fails
import pipesched
from pipesched.cli.main import main
os.chdir({str(tmp_path)!r})
row = {{"forward_ms": 9, "backward_ms": 18, "parameter_bytes": 4e6, "output_bytes": 1e5, "activation_bytes": 3e6}}
profile = pipesched.Profile.from_table([{{"name": f"block{{at}}"}} | row for at in range(4)], rows=4)
profile.to_table("layers.csv")
plan = pipesched.tune_profile(profile, num_ranks=2, batch_size=16, memory_limit_bytes="80MB", effort=10_000)
assert plan.explain()
plan.save("plan.json")
pipesched.Report(pipesched.Plan.load("plan.json")).save("plan.html")
files = ["-o", "other.json", "-o", "other.png", "-o", "other.html"]
asked = ["--batch", "16", "--ranks", "2", "--effort", "10000"]
main(["tune", "--table", "layers.csv", *asked, *files], standalone_mode=False)
print(*sorted(os.listdir()))
"""
    assert run(code)[-6:] == ["layers.csv", "other.html", "other.json", "other.png", "plan.html", "plan.json"]


def test_the_core_is_walked_into_its_packages():
    assert {"pipesched.errors", "pipesched.schedules.gpipe", "pipesched.partitioning.chain"} <= set(core())


@pytest.mark.parametrize("name", pipesched.__all__)
def test_every_public_name_resolves(name):
    assert getattr(pipesched, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'pipesched' has no attribute 'Pipe'"):
        _ = pipesched.Pipe


def test_all_public_names_are_listed():
    assert set(pipesched.__all__) <= set(dir(pipesched))
