"""No private part of torch is imported or reached into, except where a reason is written here."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "torch._dynamo.convert_frame": "its compile_lock alone keeps other threads from compiling, and so from setting "
    "back the default generators while one draws from them; it is looked up where torch has loaded it, never imported",
    "torch.distributed.distributed_c10d._world": "the groups of the job, whose NCCL ones are aborted once a rank is "
    "stuck in one; torch has no public list",
    "torch.utils._pytree": "nested tuples, lists and dicts of tensors; torch has no public module for them",
    "torch.utils._python_dispatch": "a mode that sees every operation, backward ones too, as torch's own guide to "
    "extending it documents; torch has no public module for it",
}
ALLOWED_IN_TESTS = {
    "torch.utils._python_dispatch": "sees the memory that operators make; torch has no public name",
    "torch.cuda._sleep": "keeps a GPU busy for so many cycles; torch has no public way",
}
ALLOWED_IN_BENCHMARKS = {
    "torch.distributed.pipelining.schedules._simulate_comms_compute": "the peer's simulator, timed beside ours",
}
FOLDERS = ("pipesched", "schedules", "viz", "examples", "benchmarks", "tests")
FILES = sorted(path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def dotted(node):
    """``torch.nn.Linear`` of an attribute chain that starts at a name, else None."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (start := dotted(node.value)):
        return f"{start}.{node.attr}"
    return None


def private(source, allowed=frozenset(ALLOWED)):
    """The private names of torch that Python source imports or reaches by attributes, with their lines."""
    if "torch" not in source:
        return []
    nodes = list(ast.walk(ast.parse(source)))
    torch_names, found = {}, []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
            torch_names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found += [(node.lineno, name) for name in names.values()]
            torch_names |= names
    for node in nodes:
        if isinstance(node, ast.Attribute) and (name := dotted(node)):
            start, _, rest = name.partition(".")
            found.append((node.lineno, f"{torch_names.get(start, start)}.{rest}"))
    return [(line, name) for line, name in found if name.startswith("torch.") and is_private(name, allowed)]


def is_private(name, allowed):
    parts = name.split(".")
    heads = (".".join(parts[:end]) for end, part in enumerate(parts, 1) if part[:1] == "_" != part[1:2])
    return any(head not in allowed for head in heads)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_private_part_of_torch_is_used(folder):
    extra = {"tests": ALLOWED_IN_TESTS, "benchmarks": ALLOWED_IN_BENCHMARKS}
    allowed = ALLOWED.keys() | extra.get(folder, {}).keys()
    own = [path for path in FILES if path.parts[0] == folder]
    assert own
    found = [(str(path), *each) for path in own for each in private((ROOT / path).read_text(encoding="utf-8"), allowed)]
    assert not found, f"{found}; use a public way, or write the reason in ALLOWED"


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "import torch._dynamo as dynamo",
        "from torch import _C",
        "from torch._utils import _flatten_dense_tensors",
        "from torch.distributed.pipelining._utils import flatten_args",
        "import torch\ntorch._C._set_grad_enabled(True)",
        "from torch import nn\nnn.modules._functions",
        "import torch\ntorch.cuda._sleep(1)",
        "from torch.utils import _pytree\n_pytree._private",
        "import torch.nn.functional as functional\nfunctional._verify_batch_size([])",
    ],
)
def test_private_parts_are_found(source):
    assert private(source)


@pytest.mark.parametrize(
    "source",
    [
        "from torch.utils import _pytree as pytree\npytree.tree_flatten([])",
        "import torch\ntorch.nn.Linear",
        "import torch\ntorch.__version__",
        "from pipesched.x import _y",
        "self._torch.x",
    ],
)
def test_public_parts_and_allowed_ones_are_not(source):
    assert not private(source)
