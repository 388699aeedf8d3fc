"""Size rules: predicts the sizes of a layer's results from the sizes of its arguments, learned from earlier calls."""

from collections.abc import Sequence

__all__ = ["SizeRules"]

_ENOUGH = 3  # calls with different sizes before the rules are used


class SizeRules:
    """The rules for the sizes of one kind of layer's results.

    Each size of a result is either constant or equal to a size of an argument. All candidates that agree with every
    call so far are kept. A prediction is made only if all remaining candidates of each size agree.
    """

    def __init__(self) -> None:
        self._candidates: list[set[int | None]] | None = None  # for each size: places of argument sizes; None: constant
        self._constants: list[int] = []
        self._seen: set[tuple[int, ...]] = set()

    def learn(self, given: Sequence[int], made: Sequence[int]) -> None:
        """Learn from a call with arguments of the sizes ``given`` and results of the sizes ``made``."""
        if self._candidates is None:
            self._candidates = [{None, *range(len(given))} for _ in made]
            self._constants = list(made)
        for place, size in enumerate(made):
            constant = self._constants[place]
            fitting = {one for one in self._candidates[place] if size == (constant if one is None else given[one])}
            self._candidates[place] = fitting
        self._seen.add(tuple(given))

    def predict(self, given: Sequence[int]) -> list[int] | None:
        """Return the sizes of the results of a call with arguments of these sizes; None if they are not certain."""
        if self._candidates is None or len(self._seen) < _ENOUGH:
            return None
        sizes: list[int] = []
        for candidates, constant in zip(self._candidates, self._constants, strict=True):
            found = {constant if one is None else given[one] for one in candidates}
            if len(found) != 1:
                return None
            sizes += found
        return sizes
