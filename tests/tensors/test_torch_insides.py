"""Without a private part of torch, pipesched can be imported; it does without the part, or names it."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from pipesched.errors import TorchVersionError
from pipesched.tensors.torch_insides import INSIDES, Inside
from tests.support.hidden_parts import PARTS

NAMES = [one.name for one in INSIDES]
DISPENSABLE = {
    "torch.autograd.profiler._is_profiler_enabled": "a profiler's trace has no ranges of actions",
    "torch.distributed.distributed_c10d._world": "a rank that is stuck ends its process instead",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": "a mode of the caller is not refused",
}


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """How it ends without each part whose test runs."""
    tests = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    names = [item.callspec.params["name"] for item in tests if "name" in item.callspec.params]
    command = [sys.executable, "-m", "tests.support.hidden_parts", *names]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert not run.returncode, run.stderr
    return {name: found for name, *found in map(json.loads, run.stdout.splitlines())}


def test_every_part_can_be_hidden() -> None:
    assert sorted(NAMES) == sorted(PARTS)


@pytest.mark.smoke
@pytest.mark.parametrize("inside", INSIDES, ids=NAMES)
def test_every_part_works_in_this_version(inside: Inside) -> None:
    assert inside.fault == ""
    assert inside.reason
    assert inside.seen_in


@pytest.mark.one_in(12)
@pytest.mark.timeout(360)
@pytest.mark.parametrize("name", NAMES)
def test_without_a_part_code_that_needs_it_is_refused_by_name(outcomes: dict[str, list[str]], name: str) -> None:
    imported, plain, use = outcomes[name]
    assert imported == ""
    for found in {plain, use} - {""}:
        assert found.startswith("pipesched.errors.TorchVersionError: ")
        assert name in found
        assert f"torch {torch.__version__} is installed" in found
        assert ", 2.13.0," in found
    if name in DISPENSABLE:
        assert not plain + use
    else:
        assert use


def test_a_part_that_works_differently_is_refused() -> None:
    changed = Inside("torch.changed", "of a test", lambda: False, seen_in=("2.13.0",))
    with pytest.raises(TorchVersionError, match=r"because of a test; .* \(it works differently\); .* torch: 2.13.0"):
        changed.require()


def test_a_probe_runs_once_and_outside_the_modes_of_its_caller() -> None:
    class Refusing(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError("a probe must not run in this mode")

    runs = []
    inside = Inside("torch.x", "of a test", lambda: not runs.append(torch.zeros(1).requires_grad))
    with torch.no_grad(), Refusing():
        inside.require()
        inside.require()
    assert runs == [False]


def test_probes_draw_no_random_numbers() -> None:
    before = torch.get_rng_state()
    assert not any(Inside(one.name, one.reason, one._probe).fault for one in INSIDES)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_process_that_only_receives_dataclasses_knows_how_to_rebuild_them() -> None:
    code = "from pipesched.tensors.payload import *; print(pytree.tree_leaves(Opened(dict(a=1, b=2), object)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[1, 2]\n"
