"""Measuring how much longer layers take beside others."""

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from pipesched.profiling import contention as crowding
from pipesched.profiling.contention import crowd
from pipesched.profiling.layer_profiler import QUICK, measure_layers
from pipesched.profiling.timing_run import Subject
from pipesched.tensors.caller_context import Caller
from pipesched.tensors.payload import Payload

pytestmark = pytest.mark.usefixtures("thorough")

CPU = torch.device("cpu")


def subjects(*layers):
    return [
        Subject(name=str(at), layer=layer, given=Payload.of(((torch.ones(2, 4),), {})))
        for at, layer in enumerate(layers)
    ]


def crowded(*layers, enough_s=60.0):
    return crowd(subjects(*layers), CPU, Caller.here(["cpu"], grad=True), 1, 3, enough_s)


def test_layers_and_their_copies_run_alone_in_turn_and_then_at_once(monkeypatch):
    ran, both, lock = [], threading.Barrier(2), threading.Lock()

    def timed(lap):
        with lock:
            ran.append(lap)
            alone = len(ran) <= 2 or (len(ran) - 3) % 4 < 2
        if not alone:
            both.wait(30)  # the other thread has arrived, too
        return 2.0 if alone else 3.0

    monkeypatch.setattr(crowding, "_round", timed)
    layer = nn.Linear(4, 4)
    assert crowded(layer) == [1.5] * 3
    assert [lap is ran[0] for lap in ran[:4]] == [True, False] * 2
    own, twin = (lap.subjects[0].layer for lap in ran[:2])
    assert own is layer
    assert twin is not layer
    assert torch.equal(twin.weight, layer.weight)


def test_contention_counts_only_the_time_inside_layers(monkeypatch):
    took_s = {"forward_s": 1.0, "backward_s": 2.0, "input_grad_s": 4.0, "weight_grad_s": 8.0}
    rounds = []

    class Told(crowding.TimingRun):
        def round(self, **options):
            self.note("forward_s", "backward_s")

        def weight_round(self, *, apart):
            assert apart
            self.note("forward_s", "input_grad_s", "weight_grad_s")

        def note(self, *names):
            for name in names:
                for subject in self._all:  # including the blank layers around them
                    subject.seconds.setdefault(name, []).append(took_s[name])

        def clear(self):
            rounds.append(self)
            super().clear()

    monkeypatch.setattr(crowding, "TimingRun", Told)
    lap = Told(subjects(nn.Linear(4, 4), nn.GELU()), CPU, Caller.here(["cpu"], grad=True))
    assert [crowding._round(lap) for _ in range(2)] == [2 * 16.0] * 2  # of two layers; every round counts by itself
    assert crowded(nn.Linear(4, 4)) == [1.0] * 3
    assert len(rounds) == 2 + 2 + 3 * 4


def test_the_first_round_counts_however_long_it_takes():
    (ratio,) = crowded(nn.Linear(4, 4), enough_s=0.0)
    assert ratio > 0


class Locked(nn.Module):
    """Cannot be copied."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x):
        return x * 2


def test_contention_is_not_measured_for_layers_that_cannot_be_copied():
    assert crowded(nn.Linear(4, 4), Locked()) == []


@pytest.mark.parametrize(("ratios", "crowded_s"), [([1.2, 1.5, 1.25], 0.25), ([0.9], 0), ([], 0)])
def test_the_median_counts_and_nothing_below_none(monkeypatch, ratios, crowded_s):
    monkeypatch.setattr("pipesched.profiling.layer_profiler.crowd", lambda *_: ratios)
    layers = {str(at): nn.Linear(4, 4) for at in range(2)}
    effort = replace(QUICK, crowds=True)
    for costs in measure_layers(layers, ((torch.ones(2, 4),), {}), CPU, 1, effort).values():
        assert costs.crowded_s == pytest.approx(crowded_s * (costs.forward_s + costs.backward_s))
