import subprocess
import sys
from importlib.util import find_spec

import pytest

import pipesched

CORE = [
    "actions",
    "building_blocks",
    "bounds",
    "costs",
    "dependencies",
    "errors",
    "files",
    "lowering",
    "order",
    "partitioner",
    "partitioning",
    "placement",
    "plan",
    "program",
    "schedules",
    "simulator",
    "trace",
    "validation",
    "viz",
    "zero_bubble",
]
BUILT = [f"pipesched.{name}" for name in CORE if find_spec(f"pipesched.{name}")]


def run(code):
    """What a fresh process prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_the_core_imports_no_torch():
    code = f"""
import importlib, sys
for name in {BUILT}:
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


@pytest.mark.parametrize("name", pipesched.__all__)
def test_every_public_name_resolves_once_its_module_is_there(name):
    try:
        getattr(pipesched, name)
    except ModuleNotFoundError as error:
        missing = error.name
    else:
        return
    assert missing.startswith("pipesched.")
    assert find_spec(missing) is None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'pipesched' has no attribute 'Pipe'"):
        _ = pipesched.Pipe


def test_all_public_names_are_listed():
    assert set(pipesched.__all__) <= set(dir(pipesched))
