"""Random numbers that are the same on every machine: a xorshift generator with two 32-bit words (Marsaglia 2003)."""

from pipesched.program.search.compiled import Whole, compiled, whole

__all__ = ["WORD", "draw", "start", "state"]

WORD = 0xFFFFFFFF


def state() -> Whole:
    """Allocate the state of a generator."""
    return whole([0, 0])


def start(random: Whole, seed: int) -> None:
    """Set the state of a generator from a seed."""
    random[0] = seed * 2654435769 + 362436069 & WORD
    random[1] = 521288629


@compiled
def draw(random: Whole) -> int:
    """Return a random 32-bit number."""
    a = random[0]
    b = random[1]
    a ^= (a << 10) & WORD
    a ^= a >> 13
    random[0] = b
    b ^= b >> 10
    b ^= a
    random[1] = b
    return b
