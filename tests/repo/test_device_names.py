"""Only `pipesched/devices/` names a vendor's devices. Docstrings and error messages may name one as an example."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOM = Path("pipesched/devices")
FILES = [
    path.relative_to(ROOT)
    for folder in ("pipesched", "schedules", "viz")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ROOM not in path.relative_to(ROOT).parents
]
VENDORS = r"(is_)?(cuda|xpu|npu|hpu|mtia|mps)"


def vendor_names(source: str) -> list[tuple[int, str]]:
    """Return the line and the name of each attribute and each literal that names a vendor's devices."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and re.fullmatch(VENDORS, node.attr):
            found.append((node.lineno, node.attr))
        if isinstance(node, ast.Constant) and re.fullmatch(rf"{VENDORS}(:\d*)?", str(node.value)):
            found.append((node.lineno, node.value))
    return found


def test_no_line_names_a_vendors_devices() -> None:
    assert len(FILES) > 300
    named = {str(path): vendor_names((ROOT / path).read_text(encoding="utf-8")) for path in FILES}
    assert {path: found for path, found in named.items() if found} == {}


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("torch.cuda.synchronize()", "cuda"),
        ("if tensor.is_cuda: pass", "is_cuda"),
        ("device.type == 'cuda'", "cuda"),
        ("names = [f'cuda:{at}' for at in range(4)]", "cuda:"),
        ("torch.xpu.current_stream()", "xpu"),
    ],
)
def test_a_line_that_names_a_vendors_devices_is_found(line: str, name: str) -> None:
    assert vendor_names(line) == [(1, name)]


def test_an_example_in_a_message_is_allowed() -> None:
    assert vendor_names("raise ValueError(\"pass devices=['cuda:0', 'cuda:1']\")") == []
