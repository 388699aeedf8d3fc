"""Fits of layer costs as functions of a micro-batch's size, and their place in profiles."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pipesched
from pipesched.errors import InputError, ScheduleError
from pipesched.simulation.layer_costs import LayerCosts, costs_of
from pipesched.simulation.layer_memory import LayerMemory
from pipesched.simulation.profile import Profile
from pipesched.simulation.size_fit import Size, SizeFit
from tests.support.synthetic_profiles import profile

LENGTHS = [Size(2, 2 * length) for length in (16, 64, 256, 1024)]
FACTORS = st.sampled_from([0, 1e-4, 3e-4])


def fitted(sizes: list[Size], seconds: Callable[[Size], float]) -> SizeFit:
    return SizeFit.of([(size, {"0": LayerCosts(forward_s=seconds(size))}) for size in sizes])


def forward_s(fit: SizeFit, size: Size, known: Size = LENGTHS[0], known_s: float = 1.0) -> float:
    return fit.scaled({"0": LayerCosts(forward_s=known_s)}, known, size)["0"].forward_s


@settings(max_examples=25)
@given(FACTORS, FACTORS, FACTORS, st.integers(1, 8), st.integers(1, 2000))
def test_a_sum_of_the_three_terms_is_found(fixed: float, linear: float, square: float, rows: int, length: int) -> None:
    def seconds(size: Size) -> float:
        return 1e-6 + fixed + linear * size.elements + square * size.elements**2 / size.rows / 1000

    found = forward_s(fitted(LENGTHS, seconds), Size(rows, rows * length), LENGTHS[1], seconds(LENGTHS[1]))
    assert found == pytest.approx(seconds(Size(rows, rows * length)), rel=1e-6)


def test_no_factor_is_negative() -> None:
    fit = fitted(LENGTHS, lambda size: max(1.0, size.elements - 100.0))
    assert all(factor >= 0 for factor in fit.layers["0"]["forward_s"])
    assert forward_s(fit, Size(1, 1)) >= 0


def test_with_one_size_and_without_a_fit_costs_are_proportional() -> None:
    for fit in (fitted(LENGTHS[:1], lambda _: 5.0), SizeFit()):
        assert forward_s(fit, LENGTHS[1]) == pytest.approx(4.0)


def test_rows_alone_do_not_show_a_square() -> None:
    fit = fitted([Size(rows, rows * 50) for rows in (1, 2, 4, 8)], lambda size: 1.0 + size.elements)
    assert fit.layers["0"]["forward_s"] == pytest.approx((1, 1, 0))


def test_sizes_are_scaled_but_weights_are_not() -> None:
    costs = LayerCosts(forward_s=1, parameter_bytes=10, memory=LayerMemory(activation_bytes=100, gradient_bytes=10))
    own = SizeFit().scaled({"0": costs}, Size(1, 8), Size(1, 12))["0"]
    assert (own.forward_s, own.memory.activation_bytes) == (1.5, 150)
    assert (own.parameter_bytes, own.memory.gradient_bytes) == (10, 10)


def test_other_layers_are_refused() -> None:
    with pytest.raises(ScheduleError, match="micro-batches of all sizes must run the same layers"):
        SizeFit.of([(Size(1, 1), {"0": LayerCosts()}), (Size(1, 2), {"1": LayerCosts()})])


def test_rounded_sizes_differ_little() -> None:
    rounded = {Size(1, number).rounded().elements for number in range(1, 5000)}
    assert len(rounded) < 100
    for number in range(1, 5000):
        assert abs(Size(number, number).rounded().rows / number - 1) <= 1 / 16


# ---- profiles -------------------------------------------------------------------------------------------------------


class Mixing(nn.Module):
    """A layer that also multiplies all pairs of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return torch.softmax(x @ x.transpose(1, 2), -1) @ x


def tokens(length: int) -> torch.Tensor:
    return torch.randn(2, length, 8)


def test_a_profile_of_several_lengths_has_a_fit(tmp_path: Path) -> None:
    model = nn.Sequential(Mixing(), nn.Linear(8, 4))
    longer = [pipesched.Microbatch(tokens(length), target=torch.zeros(2, length, 4)) for length in (32, 64)]
    options: dict[str, Any] = {"rows": [2], "loss_fn": nn.functional.mse_loss, "target": torch.zeros(2, 16, 4)}
    found = pipesched.profile(model, tokens(16), microbatches=longer, cache=tmp_path, **options)
    assert list(found.graphs) == [2]
    assert found.size_fit.layers["0"]["activation_bytes"][2] > 0
    for length in (16, 32, 64, 128):
        graph = pipesched.graph_of(model, tokens(length))
        own = found.size_fit.scaled(
            {name: costs_of(found.graph(2), name) for name in found.layers}, Size(2, 256), Size(2, 16 * length)
        )
        sizes = [round(costs.memory.activation_bytes / 64) for costs in own.values()]
        assert sizes == [round(graph.nodes[name]["activation_bytes"] / 64) for name in graph]
    again = pipesched.profile(model, tokens(16), microbatches=longer, cache=tmp_path, **options)
    assert again.size_fit == found.size_fit
    other = pipesched.profile(model, tokens(16), microbatches=longer[:1], cache=tmp_path, **options)
    assert other.size_fit != found.size_fit
    with pytest.raises(InputError, match="microbatches= must be a list of Microbatch"):
        pipesched.profile(model, tokens(16), microbatches=[tokens(3)], **options)


def with_fit() -> dict[str, Any]:
    known = profile([1.0])
    fit = SizeFit({"layer0": {"forward_s": (1.0, 0.5, 0.0)}})
    made: dict[str, Any] = json.loads(json.dumps(Profile(known.graphs, size_fit=fit).to_dict()))
    return made


def test_a_fit_is_saved_and_older_files_have_none() -> None:
    assert Profile.from_dict(with_fit()).size_fit.layers == {"layer0": {"forward_s": (1.0, 0.5, 0.0)}}
    values = with_fit()
    del values["size_fit"]
    assert Profile.from_dict(values).size_fit == SizeFit()


@pytest.mark.parametrize(
    ("fit", "said"),
    [
        ({"layer0": {"forward_s": [1, 2]}}, r"must have 3 factors; forward_s of layer 'layer0' has \[1, 2\]"),
        ({"layer0": {"forward_s": [1, -2, 0]}}, "a factor of forward_s of layer 'layer0' is -2"),
        ({"layer0": {"forward_s": [1, math.nan, 0]}}, "a factor of forward_s of layer 'layer0' is nan"),
        ({"layer9": {}}, "size_fit of a profile must have the profile's layers, in the same order"),
        ({"layer0": 3}, "a value is wrong"),
        ([], "a value is wrong"),
    ],
)
def test_a_wrong_fit_is_refused(fit: Any, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        Profile.from_dict({**with_fit(), "size_fit": fit})
