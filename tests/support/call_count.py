"""Call count: counts the Python calls of a piece of code. Unlike run time, the counts do not depend on the machine."""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any


def calls(act: Callable[[], Any]) -> Counter[tuple[str, str]]:
    """Count the calls of each Python function, by file and name, while ``act`` runs in this thread."""
    seen: Counter[tuple[str, str]] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            seen[frame.f_code.co_filename, frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return seen
