"""Private parts of torch are used in tensors/torch_insides.py only, and where a reason is written here."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSIDES = Path("pipesched/tensors/torch_insides.py")
HIDES_THEM = Path("tests/support/hidden_parts.py")
ALLOWED_IN_TESTS = {
    "torch.utils._pytree": "users register their types there",
    "torch.utils._python_dispatch": "sees the memory that operators make; torch has no public name",
    "torch._register_device_module": "gives a device type its module; torch has no public name",
    "torch.cuda._sleep": "keeps a GPU busy for so many cycles; torch has no public way",
    "torch.distributed.pipelining.schedules._PipelineScheduleRuntime": "the peer's runtime, for orders of ours",
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


def private(source, allowed=frozenset()):
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
    allowed = extra.get(folder, {}).keys()
    own = [path for path in FILES if path.parts[0] == folder and path not in (INSIDES, HIDES_THEM)]
    assert own
    found = [(str(path), *each) for path in own for each in private((ROOT / path).read_text(encoding="utf-8"), allowed)]
    assert not found, f"{found}; use a public way, or add an entry to {INSIDES}"


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
        "from torch.utils import _pytree as pytree\npytree.tree_flatten([])",
        "import torch.nn.functional as functional\nfunctional._verify_batch_size([])",
    ],
)
def test_private_parts_are_found(source):
    assert private(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.nn.Linear",
        "import torch\ntorch.__version__",
        "from pipesched.x import _y",
        "self._torch.x",
    ],
)
def test_uses_of_public_parts_are_not_reported(source):
    assert not private(source)


# ---- private attributes of objects -----------------------------------------------------------------------------------

#: A module's own dictionaries, and the version of a tensor, have no public names; torch's guides use these.
OF_MODULES = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_version"}
OF_MODULES |= {
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
}
OF_PYTHON = {"_replace", "_fields", "_asdict", "_make", "_getframe", "_current_frames", "_exit"}
OF_OTHERS = {
    "_can_record_outputs": "an attribute of transformers",
    "_dataloaders": "the list in which accelerate keeps the loaders that it has prepared",
    "_extra_state": "a suffix of keys in state dicts",
    "_get_num_items_in_batch": "a method of transformers' Trainer, which its subclasses override",
    "_prepare_inputs": "a method of transformers' Trainer, which its subclasses override",
}


def attributes(source):
    """Private attributes that source reads of objects, also by getattr, with their lines; and those that it defines."""
    read, defined = [], set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            defined.add(node.attr)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Attribute):
            read.append((node.lineno, node.attr))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            read += [(node.lineno, name.value) for name in node.args[1:2] if isinstance(name, ast.Constant)]
    return [(line, name) for line, name in read if name[:1] == "_" != name[1:2]], defined


def foreign_attributes(sources):
    """Private attributes that no source defines, as (path, line, name)."""
    found = {path: attributes(source) for path, source in sources.items()}
    known = OF_MODULES.union(OF_PYTHON, OF_OTHERS, *(defined for _, defined in found.values()))
    return [(path, line, name) for path, (read, _) in found.items() for line, name in read if name not in known]


def test_no_private_attribute_of_torchs_objects_is_read():
    sources = {path: (ROOT / path).read_text(encoding="utf-8") for path in FILES if path.parts[0] == "pipesched"}
    inside = sources.pop(INSIDES)
    assert not foreign_attributes(sources), f"use a public way, or add an entry to {INSIDES}"
    assert {"_base", "_schema", "_flat_weight_refs"} <= {name for *_, name in foreign_attributes({INSIDES: inside})}


@pytest.mark.parametrize("source", ["tensor._base", "getattr(module, '_reset_parameters', None)", "hasattr(x, '_y')"])
def test_private_attributes_are_found(source):
    assert foreign_attributes({"a.py": source})


@pytest.mark.parametrize(
    "source", ["tensor._version", "class A:\n    _x = 1\na._x", "self._y = 2\nother._y", "x.__class__"]
)
def test_private_attributes_of_the_packages_own_classes_are_not_reported(source):
    assert not foreign_attributes({"a.py": source})
