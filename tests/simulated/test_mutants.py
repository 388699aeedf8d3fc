"""The tables of mutants fit the source: each text that a mutant changes stands there once."""

from pathlib import Path

import pytest

from tests.simulated import mutants, process_mutants

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", [*mutants.MUTANTS, *process_mutants.MUTANTS], ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place(mutant):
    assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1
    assert mutant.new != mutant.old
    assert mutant.features or mutant.reason
