"""Ranks that call different methods are told so, instead of a wrong result or only of a wait that ended."""

from pathlib import Path

import pytest

from tests.support.jobs.other_methods import call_others
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(90)


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    ("methods", "inputs"),
    [
        (("step", "evaluate"), "all"),
        (("step", "evaluate"), "first"),
        (("evaluate", "step"), "all"),
        (("evaluate", "step"), "first"),
        (("evaluate", "forward"), "first"),
        (("save", "step"), "all"),
        (("save", "step"), "first"),
        (("report", "step"), "all"),
        (("report", "step"), "first"),
        (("step", "clip_grad_norm_"), "all"),
        (("gather_model", "step"), "all"),
        (("step", "gather_trace"), "all"),
        (("full_state_dict", "step"), "all"),
    ],
)
def test_every_rank_is_told_which_methods_were_called(
    ranks: Ranks, methods: tuple[str, str], inputs: str, tmp_path: Path
) -> None:
    for said in ranks.run(2, call_others, methods, inputs, str(tmp_path)):
        assert "all ranks must call the same method" in said, said
        assert f"rank 0 called {methods[0]}" in said
        assert f"rank 1 called {methods[1]}" in said
