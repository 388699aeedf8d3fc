"""Near-equal parts: a whole number as a sum of numbers that differ by one at most."""

__all__ = ["near_equal_parts"]


def near_equal_parts(total: int, num_parts: int) -> list[int]:
    """The parts, the larger ones first, as ``torch.tensor_split`` makes them: 7 in 4 parts are 2, 2, 2, 1."""
    each, more = divmod(total, num_parts)
    return [each + (part < more) for part in range(num_parts)]
