"""A size is measured in a third pass only if the first two do not agree."""

import pytest
import torch
from torch import nn

import pipesched
from pipesched.profiling import profile_model
from pipesched.simulation.layer_costs import LayerCosts

pytestmark = pytest.mark.usefixtures("thorough")


@pytest.mark.parametrize(
    ("times", "median_s", "passes"),
    [
        ([1.0, 1.01, 5.0], 1.005, 2),
        ([1.0, 1.2, 1.1], 1.1, 3),
    ],
)
def test_a_third_pass_runs_if_the_first_two_disagree(monkeypatch, times, median_s, passes):
    left = list(times)
    efforts = []

    def measure(known, device, threads, effort):
        efforts.append(effort)
        own = left.pop(0)
        return {name: LayerCosts(forward_s=own, backward_s=2.0) for name in known.layers}

    monkeypatch.setattr(profile_model, "measure", measure)
    monkeypatch.setattr(profile_model, "_check_sum", lambda *_: None)
    found = pipesched.profile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4), rows=[2])
    assert found.graph(2).nodes["0"]["forward_s"] == pytest.approx(median_s)
    assert len(efforts) == passes
    assert sum(effort.checks for effort in efforts) == 1


def test_short_layers_do_not_call_for_a_third_pass():
    one = {"long": LayerCosts(forward_s=1.0, backward_s=2.0), "short": LayerCosts(forward_s=0.001, backward_s=0.001)}
    other = {**one, "short": LayerCosts(forward_s=0.003, backward_s=0.001)}
    assert profile_model._agree(one, other)
    assert not profile_model._agree(one, {**one, "short": LayerCosts(forward_s=0.1, backward_s=0.001)})
