"""Random user code trains as in plain PyTorch, or is refused: 200 of the cases that benchmarks/foreign.py draws."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.support.rank_processes import Ranks
from tests.support.unguarded import unguarded

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from foreign import PASSES, merged
from foreign_case import Outcome, outcome_of
from foreign_kinds import KINDS, draw_case, variants

SEEDS = range(200)
ALONE = [seed for seed in SEEDS if draw_case(seed).world == 1]
OVER_RANKS = [seed for seed in SEEDS if draw_case(seed).world > 1]
BLOCK = 25

pytestmark = pytest.mark.filterwarnings("ignore")


def blocks(seeds: list[int]) -> list[list[int]]:
    return [seeds[begin : begin + BLOCK] for begin in range(0, len(seeds), BLOCK)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.one_in(6)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seeds", blocks(ALONE), ids=str)
def test_user_code_in_one_process(seeds: list[int]) -> None:
    found = {seed: outcome_of(draw_case(seed)) for seed in seeds}
    assert {seed: outcome for seed, outcome in found.items() if outcome.word not in PASSES} == {}


@pytest.mark.one_in(6)
@pytest.mark.timeout(180)
@pytest.mark.parametrize("seeds", blocks(OVER_RANKS), ids=str)
def test_user_code_over_two_ranks(ranks: Ranks, seeds: list[int]) -> None:
    from tests.support.jobs import foreign as jobs  # needs the path of the benchmarks

    found = {}
    for seed in seeds:
        results = ranks.run(2, jobs.outcome, seed, timeout_s=60)
        found[seed] = merged([Outcome(word=word, detail=detail) for word, detail in results])
    assert {seed: outcome for seed, outcome in found.items() if outcome.word not in PASSES} == {}


def test_a_missing_guard_is_found() -> None:
    cases = [draw_case(seed, "attributes of weights: a tied weight") for seed in range(20)]
    alone = [case for case in cases if case.world == 1]
    assert alone
    with unguarded("attributes of weights"):
        assert "silent" in {outcome_of(case).word for case in alone[:4]}


def test_every_variant_is_drawn_by_itself() -> None:
    for variant in variants():
        name = f"{variant.kind}: {variant.name}"
        assert draw_case(0, name).kinds == [name]


def test_kinds_are_drawn_often_and_together() -> None:
    cases = [draw_case(seed) for seed in range(2000)]
    drawn = Counter(name.partition(":")[0] for case in cases for name in case.kinds)
    assert drawn.keys() == KINDS.keys()
    assert min(drawn.values()) >= 40
    assert sum(len(case.kinds) > 1 for case in cases) >= 1000
