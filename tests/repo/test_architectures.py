"""The census of transformers classes runs, and its page groups results by cause."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="the census needs transformers: pip install pipesched[zoo]",
)
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

NAMES = [
    "BertForSequenceClassification",
    "LlamaForCausalLM",
    "ViTForImageClassification",
    "T5ForConditionalGeneration",
    "WhisperForConditionalGeneration",
    "SegformerForSemanticSegmentation",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_class_is_built_and_trains_plain(name):
    from architecture_trials import Search, transformers

    search = Search(getattr(transformers, name))
    specimen = search.found()
    assert specimen is not None, search.cause()
    assert specimen.recipe.own_loss
    assert sum(parameter.numel() for parameter in specimen.model().parameters()) < 5_000_000


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["BertForSequenceClassification", "ViTForImageClassification"])
def test_a_trial_compares_three_stages_with_the_plain_loop(name):
    from architecture_trials import trial

    record = trial(name, ["all padded"])
    assert record["trials"]["all padded"]["verdict"] == "same bits"


@pytest.mark.exhaustive
def test_every_class_with_a_head_is_found():
    from architectures import classes

    found = classes()
    assert len(found) > 900
    assert set(NAMES) < set(found)


def test_the_page_groups_errors_by_their_first_part():
    from compatibility_page import page

    errors = [f"GraphError: the size of 'x{n}' is {n}; pass another (modeling_bert.py:{n})" for n in (1, 2)]
    refused = [
        {
            "name": f"A{n}",
            "built": True,
            "plain": True,
            "trials": {"all padded": {"verdict": "refused", "error": error}},
        }
        for n, error in enumerate(errors)
    ]
    lost = {"name": "B", "built": False, "plain": False, "cause": "ImportError: no timm"}
    text = page([*refused, lost])
    assert "- **2** GraphError: the size of … is N: A0, A1" in text
    assert "| refused | 2 | 2 |" in text
    assert "- **1** ImportError: no timm: B" in text
