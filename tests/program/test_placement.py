from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipesched.errors import ScheduleError
from pipesched.program.placement import chunks_of, linear, loop, table, v
from tests.support.random_programs import quick


def test_rules_lay_stages_out_as_their_papers_draw_them():
    assert linear(3) == (0, 1, 2)
    assert linear(3, 2) == (0, 0, 1, 1, 2, 2)
    assert loop(3, 2) == (0, 1, 2, 0, 1, 2)
    assert v(3, 2) == (0, 1, 2, 2, 1, 0)
    assert v(3, 3) == (0, 1, 2, 2, 1, 0, 0, 1, 2)


@quick
@given(st.sampled_from([linear, loop, v]), st.integers(1, 9), st.integers(1, 5))
def test_every_rule_gives_each_rank_its_number_of_chunks(rule, num_ranks, chunks_per_rank):
    counts = Counter(rule(num_ranks, chunks_per_rank))
    assert counts == dict.fromkeys(range(num_ranks), chunks_per_rank)


def test_chunks_of_a_rank_are_its_stages_in_order():
    assert chunks_of(v(3, 2), 0) == (0, 5)
    assert chunks_of((1, 0, 1), 1) == (0, 2)
    assert chunks_of((1, 1), 0) == ()


def test_a_table_may_be_any_table_of_ranks():
    assert table([1, 0, 1], num_ranks=2) == (1, 0, 1)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_table_with_a_rank_that_does_not_exist_is_refused(rank):
    with pytest.raises(ScheduleError, match=rf"ranks 0\.\.1; stage 1 is placed on rank {rank}; correct the placement"):
        table([0, rank], num_ranks=2)
