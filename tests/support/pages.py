"""Pages: extracts the code of Markdown pages as complete Python files. Diffs are applied."""

import re
from pathlib import Path

#: A code block after a torchrun command is a file of its own: matches the option, the file's name and the code.
TORCHRUN_BLOCK = re.compile(r"`torchrun (--nproc_per_node \d) (\w+\.py)`[^`]*:\n\n```python\n(.*?)^```", re.M | re.S)


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return the language and the text of every fenced block."""
    return re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def side(diff: str, sign: str) -> str:
    """Return the new code of a diff if ``sign`` is "+", and the old code if it is "-"."""
    return "".join(f"{line[2:]}\n" for line in diff.splitlines() if not line or line[0] in f" {sign}")


def torchrun_files(page: Path) -> list[tuple[str, str, str]]:
    """Return torchrun's option, the name and the code of every file that a page runs under torchrun."""
    return TORCHRUN_BLOCK.findall(page.read_text(encoding="utf-8"))


def python_blocks(page: Path) -> list[str]:
    """Return the blocks that a reader runs in one Python session, in the order of the page."""
    files = [code for _, _, code in torchrun_files(page)]
    code = [side(text, "+") if kind == "diff" else text for kind, text in blocks(page) if kind in ("python", "diff")]
    return [text for text in code if text not in files]


def sessions(page: Path) -> list[str]:
    """Return the code of a page as complete Python files: the session, and every file for torchrun."""
    session = "\n".join(python_blocks(page))
    return [text for text in (session, *(code for _, _, code in torchrun_files(page))) if text]
