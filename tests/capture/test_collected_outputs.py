"""Models of transformers whose code reads what modules inside layers have computed, such as the logits of routers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipesched import Pipeline
from pipesched.capture.layered_model import layered
from pipesched.errors import GraphError
from pipesched.model import collected_outputs
from pipesched.model.module_tree import recorders_of
from pipesched.testing import reference_step
from pipesched.torch_checks import as_call
from tests.support.models import every_product_deferred

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install pipesched[zoo]")

__all__ = ["every_product_deferred"]  # a fixture

pytestmark = [
    pytest.mark.usefixtures("every_product_deferred"),
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:each micro-batch must be weighted"),  # all micro-batches have as many labels
]

TOKENS = torch.randint(1, 60, (8, 6), generator=torch.Generator().manual_seed(0))
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROUTED: dict[str, Any] = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
HIDDEN, ATTENTIONS = {"output_hidden_states": True}, {"output_attentions": True}


def made(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**{**SIZES, **settings})
        model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
        return model

    return make


MIXTRAL = made("Mixtral", num_local_experts=4, **ROUTED)
LLAMA = made("Llama")

MODELS: list[Any] = [
    pytest.param(MIXTRAL, {}, id="Mixtral"),
    pytest.param(made("Mixtral", num_local_experts=4, num_hidden_layers=2, **ROUTED), {}, id="routers are layers"),
    pytest.param(MIXTRAL, HIDDEN | ATTENTIONS, id="Mixtral and all outputs"),
    pytest.param(
        made("Mixtral", num_local_experts=4, num_experts_per_tok=2), {"output_router_logits": True}, id="by an argument"
    ),
    pytest.param(made("Qwen3Moe", num_experts=4, moe_intermediate_size=16, head_dim=8, **ROUTED), {}, id="Qwen3Moe"),
    pytest.param(made("GptOss", num_local_experts=4, head_dim=8, **ROUTED), {}, id="GptOss"),
    pytest.param(made("Olmoe", num_experts=4, **ROUTED), {}, id="Olmoe"),
    pytest.param(LLAMA, HIDDEN, id="hidden states"),
    pytest.param(LLAMA, ATTENTIONS, id="attentions"),
    pytest.param(LLAMA, {"output_hidden_states": [0, 2]}, id="some hidden states"),
]


def check(make: Callable[[], nn.Module], settings: dict[str, Any], stages: int, **options: Any) -> None:
    """Check that losses and gradients are bit-identical to a plain loop's."""
    own, plain = make(), make()
    fixed = {"use_cache": False, **settings}
    sample = {"input_ids": TOKENS[:2], "labels": TOKENS[:2], **fixed}
    batch = {"input_ids": TOKENS, "labels": TOKENS, **fixed}
    planned = {"schedule": "1f1b", "num_microbatches": 4, "seed": 5, **options}
    with Pipeline(own, sample, devices=["cpu"] * stages, **planned) as pipe:
        for step in range(2):
            own.zero_grad()
            plain.zero_grad()
            loss = pipe.step(**batch)
            assert torch.equal(loss, reference_step(plain, num_microbatches=4, seed=5, step=step, **batch))
            for (name, one), other in zip(own.named_parameters(), plain.parameters(), strict=True):
                assert one.grad is None if other.grad is None else torch.equal(one.grad, other.grad), name
        own.eval()
        plain.eval()
        with torch.no_grad():
            losses = [plain(input_ids=part, labels=part, **fixed).loss for part in TOKENS.chunk(4)]
        torch.testing.assert_close(pipe.evaluate(**batch), torch.stack(losses).mean())


@pytest.mark.one_in(24)
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize(("make", "settings"), MODELS)
def test_trains_like_the_reference_loop(make: Callable[[], nn.Module], settings: dict[str, Any], stages: int) -> None:
    check(make, settings, stages)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "zb-h1"},
        {"checkpoint": "always"},
        {"checkpoint": {"model.layers.0": "recompute", "model.layers.1": "recompute-cheap"}},
        {"boundaries": ["model.layers.1", "lm_head"]},
        {"whole_layers": ["model.layers.0"]},
    ],
    ids=str,
)
def test_router_logits_under(options: dict[str, Any]) -> None:
    check(MIXTRAL, HIDDEN, 3, **options)


def test_outputs_have_what_layers_collect() -> None:
    model = MIXTRAL()
    settings = {"use_cache": False, **HIDDEN, **ATTENTIONS}
    plain = [model(input_ids=part, labels=part, **settings) for part in TOKENS.chunk(4)]
    sample = {"input_ids": TOKENS[:2], "labels": TOKENS[:2], **settings}
    with Pipeline(model, sample, devices=["cpu"] * 3, schedule="1f1b", num_microbatches=4) as pipe:
        _, outputs = pipe.step(input_ids=TOKENS, labels=TOKENS, **settings, return_outputs=True)
    for place, found in enumerate(outputs["hidden_states"]):
        assert torch.equal(found, torch.cat([one["hidden_states"][place] for one in plain]))
    for key in ("attentions", "router_logits"):  # not a row of the batch in dimension 0, so one entry a micro-batch
        for place, parts in enumerate(outputs[key]):
            assert all(torch.equal(part, one[key][place]) for part, one in zip(parts, plain, strict=True))


def test_layers_get_the_hooks_of_the_library_once() -> None:
    def hooks(model: nn.Module) -> list[int]:
        return [len(recorders_of(module)) for module in model.modules()]

    model, plain = LLAMA(), LLAMA()
    settings = {"use_cache": False, **HIDDEN}
    sample = {"input_ids": TOKENS[:2], "labels": TOKENS[:2], **settings}
    with Pipeline(model, sample, devices=["cpu"] * 3, schedule="1f1b", num_microbatches=4) as pipe:
        pipe.step(input_ids=TOKENS, labels=TOKENS, **settings)
    plain(input_ids=TOKENS, labels=TOKENS, **settings)
    assert hooks(model) == hooks(plain)
    assert max(hooks(plain)) == 1


def test_stages_begin_between_layers_with_routers() -> None:
    known = layered(MIXTRAL(), as_call({"input_ids": TOKENS[:2], "labels": TOKENS[:2], "use_cache": False}), ())
    assert {f"model.layers.{number}" for number in range(4)} <= known.layers.keys()
    assert not known.primary_capture.hidden


def test_a_library_whose_lists_are_not_found_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collected_outputs, "_COLLECTOR", "moved")
    with pytest.raises(GraphError, match="this version of transformers"):
        check(LLAMA, HIDDEN, 2)


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = MIXTRAL()
    sample: dict[str, Tensor | bool] = {"input_ids": TOKENS[:2], "labels": TOKENS[:2], "use_cache": False}
    known = layered(model, as_call(sample), ())
    calls = [call for call in known.primary_capture.calls if call.layer.startswith("model.layers.")]
    assert [len(call.collected) for call in calls] == [1, 1, 1, 1]
