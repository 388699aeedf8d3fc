"""Every model of the zoo trains in four stages, as the unpipelined loop does, bit by bit, and its stages are even."""

import importlib.util
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipesched
from pipesched import Pipeline
from pipesched.testing import reference_step
from tests.support import places
from tests.support.models import assert_as, assert_equal_bits, gradients
from tests.support.rank_processes import Ranks
from tests.support.whole_state import unchanged
from tests.support.zoo_architectures import MORE, ROWS, ZOO, Specimen
from tests.support.zoo_work import counted, even_boundaries, shares

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="the zoo is built by transformers: pip install pipesched[zoo]",
)
STAGES = MICROBATCHES = 4
SCHEDULES = dict(zip(ZOO, itertools.cycle(["1f1b", "zb-h1"])))


def state(model: nn.Module) -> dict[str, Tensor]:
    """Gradients and buffers."""
    return {name: value.clone() for name, value in (*gradients(model).items(), *model.named_buffers())}


def pipeline(model: nn.Module, specimen: Specimen, **options: Any) -> Pipeline:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "BatchNorm sees one micro-batch")
        sample, loss_fn = specimen.rows(ROWS // MICROBATCHES), specimen.loss_fn
        return Pipeline(model, sample, loss_fn=loss_fn, num_microbatches=MICROBATCHES, seed=3, **options)


def reference(model: nn.Module, specimen: Specimen) -> Tensor:
    """A step of the unpipelined loop; the loss."""
    choices = {"loss_fn": specimen.loss_fn, "num_microbatches": MICROBATCHES, "seed": 3}
    return reference_step(model, **specimen.inputs, **specimen.target, **choices)


def parameters_of(pipe: Pipeline) -> list[int]:
    """How many parameters each stage uses."""
    stages = [[pipe.model.get_submodule(name.partition("#")[0]) for name in names] for names in pipe.plan.stages]
    return [sum(p.numel() for layer in layers for p in layer.parameters()) for layers in stages]


@pytest.mark.one_in(64)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.smoke if name == "GPT-2" else ()) for name in ZOO]
)
@pytest.mark.usefixtures("every_product_deferred")
def test_it_trains_as_the_loop_bit_by_bit_in_even_stages(name: str) -> None:
    specimen = ZOO[name]
    plain = specimen.made()
    work = counted(plain, specimen.rows(ROWS // MICROBATCHES))
    boundaries = even_boundaries(work, STAGES)
    due = reference(plain, specimen)
    expected = state(plain)
    model = specimen.made()
    with unchanged(model, "Pipeline"):
        pipe = pipeline(model, specimen, devices=["cpu"] * STAGES, schedule=SCHEDULES[name], boundaries=boundaries)
    with pipe:
        loss = pipe.step(**specimen.inputs, **specimen.target)
        assert all(parameters_of(pipe))
        assert max(shares(work, pipe.plan.stages)) <= 1.5 / STAGES
    assert torch.equal(loss, due)
    assert_equal_bits(state(model), expected)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", ["GPT-2", "T5", "ResNet"])
def test_graph_of_leaves_it_as_it_is(name: str) -> None:
    specimen = ZOO[name]
    model = specimen.made()
    with unchanged(model, "graph_of"):
        assert pipesched.graph_of(model, specimen.rows(2)).number_of_nodes() > STAGES


@pytest.mark.one_in(36)
@pytest.mark.parametrize("name", MORE)
@pytest.mark.usefixtures("every_product_deferred")
def test_it_trains_as_the_loop_bit_by_bit_cut_by_measured_times(name: str) -> None:
    specimen = MORE[name]
    plain = specimen.made()
    due = reference(plain, specimen)
    expected = state(plain)
    model = specimen.made()
    with pipeline(model, specimen, devices=["cpu"] * specimen.ranks, schedule="zb-h1") as pipe:
        loss = pipe.step(**specimen.inputs, **specimen.target)
    assert torch.equal(loss, due)
    actual = state(model)
    if specimen.rounded:
        torch.testing.assert_close(actual.pop(specimen.rounded), expected.pop(specimen.rounded))
    assert_equal_bits(actual, expected)


def train(group: places.Group, name: str, schedule: str) -> None:
    specimen = ZOO[name]
    plain, own = specimen.made(), specimen.made()
    boundaries = even_boundaries(counted(plain, specimen.rows(ROWS // MICROBATCHES)), STAGES)
    with pipeline(own, specimen, schedule=schedule, boundaries=boundaries, **places.place(group)) as pipe:
        assert torch.equal(pipe.step(**specimen.inputs, **specimen.target), reference(plain, specimen))
        assert_as(pipe, plain)


@pytest.mark.one_in(5)
@pytest.mark.timeout(100)
@pytest.mark.parametrize("name", ["T5", "GPT-2", "ResNet", "ALBERT", "Wav2Vec2"])
def test_it_trains_over_a_mesh(ranks: Ranks, name: str) -> None:
    """Decoders, encoders, tied weights, shared layers and convolutions."""
    ranks.run(2, train, name, "interleaved-1f1b", timeout_s=90)
