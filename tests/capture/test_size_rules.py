"""Size rules: sizes of results are predicted only if all earlier calls leave no doubt."""

from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from pipesched.capture.size_rules import SizeRules

Sizes = Sequence[int]
RULES: list[Callable[[Sizes], list[int]]] = [
    lambda sizes: [*sizes],
    lambda sizes: [sizes[1], 7, sizes[0]],
    lambda sizes: [3],
    lambda sizes: [sizes[0] * sizes[1]],
    lambda sizes: [max(sizes)],
    lambda sizes: [sizes[0] // 2, sizes[1]],
]


@given(st.sampled_from(RULES), st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12))
def test_rules_that_copy_sizes_are_predicted_and_others_are_never_wrong_for_known_calls(
    rule: Callable[[Sizes], list[int]], calls: list[tuple[int, int]]
) -> None:
    rules = SizeRules()
    for sizes in calls:
        rules.learn(sizes, rule(sizes))
    for sizes in calls:
        assert rules.predict(sizes) in (None, rule(sizes))


def test_a_copied_and_a_constant_size_are_predicted_after_a_few_calls() -> None:
    rules = SizeRules()
    for length in (4, 6, 9):
        assert rules.predict((2, length)) is None
        rules.learn((2, length), (2, length, 8))
    assert rules.predict((2, 50)) == [2, 50, 8]
    assert rules.predict((3, 50)) is None  # the first size may be constant


def test_a_size_that_is_computed_is_never_predicted() -> None:
    rules = SizeRules()
    for length in (4, 6, 9, 12):
        rules.learn((length,), (length // 2,))
    assert rules.predict((20,)) is None
