"""The cases that run of tests marked one_in."""

from itertools import pairwise, product

from tests.support.case_selection import spread


def test_every_value_of_every_parameter_is_chosen_where_there_are_cases_enough():
    cases = [{"name": name, "size": size, "mode": mode} for name, size, mode in product("abcdefgh", range(4), "xy")]
    chosen = spread(cases, 8)
    assert len(set(chosen)) == 8
    assert 0 in chosen
    for name in cases[0]:
        assert {cases[place][name] for place in chosen} == {case[name] for case in cases}


def test_cases_of_one_parameter_are_spread_over_their_order():
    chosen = sorted(spread([{"seed": seed} for seed in range(100)], 10))
    assert len(chosen) == 10
    assert all(end - begin <= 13 for begin, end in pairwise([*chosen, 100]))


def test_values_that_cannot_be_hashed_are_told_apart():
    assert sorted(spread([{"sizes": [1]}, {"sizes": [1]}, {"sizes": [2]}], 2)) == [0, 2]


def test_no_more_are_chosen_than_there_are():
    assert spread([{"x": 1}], 3) == [0]
