"""Models of transformers that "auto" divides: runs resume with other ranks, and other programs read their weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.rank_processes import Ranks, preload

pytestmark = pytest.mark.timeout(180)
pytest.importorskip("transformers", reason="needs transformers: pip install pipesched[zoo]")
preload("tests.support.divided_transformers")  # importing transformers takes seconds


def saved(group: Any, *args: Any) -> Any:
    from tests.support.jobs import split_transformers

    return split_transformers.saved(group, *args)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_a_run_resumes_with_other_ranks_and_transformers_reads_its_weights(
    four: Ranks, two: Ranks, tmp_path: Path, name: str
) -> None:
    from tests.support.jobs import split_transformers as jobs

    losses, norms, model = jobs.loop(name, 3 * jobs.STEPS)
    path = str(tmp_path / "2x2")
    results = four.run(4, saved, name, (2, 2), path, timeout_s=120)
    later = four.run(4, saved, name, (1, 4), str(tmp_path / "1x4"), f"{path}/run", timeout_s=120)
    last = two.run(2, saved, name, (1, 2), str(tmp_path / "1x2"), f"{tmp_path}/1x4/run", timeout_s=120)
    for run, found in enumerate((results, later, last)):
        for own in found:
            assert own["losses"] == pytest.approx(losses[run * jobs.STEPS :][: jobs.STEPS], rel=1e-10)
            assert own["norms"] == pytest.approx(norms[run * jobs.STEPS :][: jobs.STEPS], rel=1e-10)
    due = model.state_dict()
    found = last[0]["state"]
    assert found.keys() == due.keys()
    for key, value in found.items():
        torch.testing.assert_close(value, due[key], rtol=1e-8, atol=1e-9)
    for folder in ("weights", "pretrained"):
        assert torch.equal(jobs.read_again(name, tmp_path / "1x2" / folder), last[0]["logits"])
