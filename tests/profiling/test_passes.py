"""A size is measured once, or twice, or in a third pass if the first two do not agree."""

import pytest
import torch
from torch import nn

import pipesched
from pipesched.profiling import profile_model
from pipesched.simulation.layer_costs import LayerCosts

pytestmark = pytest.mark.usefixtures("thorough")


@pytest.mark.parametrize(
    ("times", "median_s", "passes", "options"),
    [
        ([1.0, 1.01, 5.0], 1.005, 2, {}),
        ([1.0, 1.2, 1.1], 1.1, 3, {}),
        ([1.0, 1.2, 1.1], 1.0, 1, {"thorough": False}),
    ],
)
def test_a_third_pass_runs_if_the_first_two_disagree(monkeypatch, times, median_s, passes, options):
    left = list(times)
    efforts = []

    def measure(known, device, threads, effort):
        efforts.append(effort)
        own = left.pop(0)
        return {name: LayerCosts(forward_s=own, backward_s=2.0) for name in known.layers}

    monkeypatch.setattr(profile_model, "measure", measure)
    summed = []
    monkeypatch.setattr(profile_model, "_check_sum", lambda *_: summed.append(1))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    found = pipesched.profile(model, torch.randn(2, 4), rows=[2], **options)
    assert found.graph(2).nodes["0"]["forward_s"] == pytest.approx(median_s)
    assert len(efforts) == passes
    assert sum(effort.checks for effort in efforts) == 1
    assert len(summed) == (0 if options else 1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("confirm", [0, 2])
def test_tune_measures_once_if_runs_correct_the_costs(monkeypatch, confirm):
    efforts = []

    def measure(known, device, threads, effort):
        efforts.append(effort)
        return {name: LayerCosts(forward_s=1.0 + len(efforts), backward_s=2.0) for name in known.layers}

    monkeypatch.setattr(profile_model, "measure", measure)
    monkeypatch.setattr(profile_model, "_check_sum", lambda *_: None)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    pipesched.tune(model, torch.randn(2, 4), devices=["cpu"] * 2, batch_size=8, num_microbatches=4, confirm=confirm)
    assert len(efforts) == (1 if confirm else 3)


def test_short_layers_do_not_call_for_a_third_pass():
    one = {"long": LayerCosts(forward_s=1.0, backward_s=2.0), "short": LayerCosts(forward_s=0.001, backward_s=0.001)}
    other = {**one, "short": LayerCosts(forward_s=0.003, backward_s=0.001)}
    assert profile_model._agree(one, other)
    assert not profile_model._agree(one, {**one, "short": LayerCosts(forward_s=0.1, backward_s=0.001)})
