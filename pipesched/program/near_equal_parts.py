"""Near-equal parts: divides an integer into parts that differ by at most 1."""

__all__ = ["near_equal_parts"]


def near_equal_parts(total: int, num_parts: int) -> list[int]:
    """Split ``total`` like ``torch.tensor_split``, the larger parts first: 7 split into 4 parts gives [2, 2, 2, 1]."""
    smaller, num_larger = divmod(total, num_parts)
    return [smaller + (part < num_larger) for part in range(num_parts)]
