"""Progress bar: shows on stderr how much of a search is done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(shown: bool) -> Iterator[Callable[[float], None]]:
    """Show a progress bar if ``shown`` and tqdm is installed. Yields a function that sets the progress, from 0 to 1."""
    try:
        from tqdm import tqdm
    except ImportError:
        shown = False
    if not shown:
        yield lambda _: None
        return
    with tqdm(total=100, desc="searching for a plan", bar_format="{desc}: {percentage:3.0f}% {bar} {elapsed}") as bar:
        yield lambda share: bar.update(round(100 * share) - bar.n) and None
