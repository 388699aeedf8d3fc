"""No line of a step waits for a device, except where a table says why."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "pipesched"
WAITS = {"item", "cpu", "tolist", "synchronize", "numpy", "nonzero", "block_current_stream"}
#: Where a host may wait for a device, by file and function, and why.
MAY_WAIT = {
    ("runtime/executors/device_streams.py", "seconds"),  # who reads times
    ("runtime/executors/device_streams.py", "unpack"),  # a CPU rank that takes a value from a GPU
    ("runtime/microbatches.py", "_weights"),  # counting targets on a device: once a step, as docs/howto/losses.md says
    ("runtime/step_call.py", "_read"),  # numbers that rank 0 dealt, which lie on the host
    ("runtime/transport/host_copies.py", "_carry"),  # a thread of its own
    ("runtime/transport/device_channels.py", "drain"),  # when links are made and closed
    ("runtime/transport/device_channels.py", "_read"),  # bytes of a header, which lie on the host
}
STEP = [
    *(
        "runtime/stage/stage.py",
        "runtime/stage/split_backward.py",
        "runtime/stage/weight_stash.py",
        "tensors/payload.py",
        "tensors/keyed_random.py",
        "tensors/function_mode.py",
        "runtime/microbatches.py",
        "runtime/step_call.py",
    ),
    *(
        "tensors/caller_context.py",
        "runtime/async_steps.py",
        "runtime/executors/interpreter.py",
        "runtime/executors/threads.py",
        "runtime/executors/device_streams.py",
    ),
    *("runtime/transport/device_channels.py", "runtime/transport/host_copies.py"),
]


def waits(source: str) -> list[tuple[str, int]]:
    """(function, line) of each call that waits for a device where its tensor lies on one."""
    found = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAITS:
            found.append((function, node.lineno))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(source), "")
    return found


@pytest.mark.parametrize("name", STEP)
def test_no_line_of_a_step_waits_for_a_device(name):
    found = [one for one in waits((PACKAGE / name).read_text(encoding="utf-8")) if (name, one[0]) not in MAY_WAIT]
    assert not found


def test_a_line_that_waits_for_a_device_is_found():
    assert waits("def f(x):\n    return x.sum().item()") == [("f", 2)]
