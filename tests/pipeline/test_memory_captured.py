"""Predicted memory of models with a forward of their own against what ranks hold: within 10 %, and never less."""

import copy
import gc
import math
import threading
from queue import SimpleQueue

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipesched import Pipeline, graph_of, schedules
from pipesched.program.actions import Kind
from pipesched.program.lowering import lower
from pipesched.runtime.executors import threads as local
from pipesched.testing import MemoryMeter
from tests.support.branching_models import Tied, inputs_of, made, pipeline
from tests.support.large_models import CLASSES, GPT, ROWS, WIDTH, Opened, UNet, repeated
from tests.support.models import every_product_deferred  # noqa: F401  a fixture

MICROBATCHES = 4


class Turns:
    """Queues by which one rank runs as far ahead as it can: others take a message only while it waits for one.

    So what it has sent waits for as long as it may: what ranks hold is then no matter of which thread is faster.
    """

    def __init__(self, pipe, rank):
        program = lower(pipe._running.assembly.program)
        self.ahead, self.waiting = f"pipesched rank {rank}", threading.Event()
        order = program.orders[rank]
        self.steps = self.left = sum(action.kind in (Kind.RECV_F, Kind.RECV_B) for action in order)

    def make(self):
        turns, awaited = self, [False]

        class Channel:
            def __init__(self):
                self.queue = SimpleQueue()

            def put(self, message):
                if awaited[0]:
                    awaited[0] = False
                    turns.waiting.clear()
                self.queue.put(message)

            def get(self):
                if threading.current_thread().name != turns.ahead:
                    turns.waiting.wait()
                    return self.queue.get()
                if self.queue.empty():
                    awaited[0] = True
                    turns.waiting.set()
                message = self.queue.get()
                turns.left -= 1
                if not turns.left:  # the others come to their end
                    turns.waiting.set()
                return message

        return Channel()

    def begin(self):
        self.left = self.steps
        self.waiting.clear()


def check(pipe, step, monkeypatch, most=1.1):
    """Three steps, of which the last counts, with each rank ahead in turn."""
    for rank, own in enumerate(pipe.predicted_memory):
        turns = Turns(pipe, rank)
        with MemoryMeter(pipe) as meter, monkeypatch.context() as patch:
            patch.setattr(local, "SimpleQueue", turns.make)
            for _ in range(3):
                turns.begin()
                meter.mark()
                step()
                pipe.zero_grad()
        measured = meter.peak_bytes[rank] + own.batch
        assert 1 <= own.total_bytes / measured <= most, (rank, measured, own.total_bytes / measured, own)


def compare(monkeypatch, model, sample, schedule, most=1.1, **options):
    choices = {"schedule": schedule, "num_microbatches": MICROBATCHES, "seed": 1, "devices": ["cpu"] * 2, **options}
    layers = list(graph_of(model, sample, measured=False))  # cuts by measured times would not be the same ones
    num_stages = len(choices["devices"]) * schedules.get(schedule).chunks_per_rank
    choices["boundaries"] = [layers[len(layers) * stage // num_stages] for stage in range(1, num_stages)]
    batch, target = torch.cat([sample] * MICROBATCHES), torch.arange(MICROBATCHES * ROWS) % CLASSES
    with Pipeline(model, sample, **{"loss_fn": functional.cross_entropy, **choices}) as pipe:
        check(pipe, lambda: pipe.step(batch, target=target), monkeypatch, most)


def convolutions():
    layers = []
    for before, after in ((3, 8), (8, 8), (8, 16), (16, 16), (16, 16), (16, 16)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))


MODELS = {
    "gpt": (lambda: GPT(tied=False), lambda: torch.arange(ROWS)),
    "tied": (lambda: GPT(tied=True), lambda: torch.arange(ROWS)),
    "opened": (Opened, lambda: torch.rand(ROWS, WIDTH)),
    "unet": (UNet, lambda: torch.rand(ROWS, 3, 12, 12)),
    "repeated": (repeated, lambda: torch.rand(ROWS, WIDTH)),
    "convolutions": (convolutions, lambda: torch.rand(ROWS, 3, 8, 8)),
}


@pytest.fixture
def model(name):
    torch.manual_seed(0)
    return MODELS[name][0]()


@pytest.fixture
def sample(name):
    return MODELS[name][1]()


@pytest.mark.one_in(16)
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("gpt", "1f1b"),
        ("tied", "gpipe"),
        ("opened", "gpipe"),
        ("unet", "1f1b"),
        ("repeated", "1f1b"),
        ("tied", "interleaved-1f1b"),
        ("opened", "zb-h1"),
    ],
)
@pytest.mark.usefixtures("every_product_deferred")
def test_models_of_any_code_need_at_most_a_tenth_less_than_predicted(monkeypatch, model, sample, schedule):
    compare(monkeypatch, model, sample, schedule)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "schedule"),
    [("tied", "1f1b"), *(("convolutions", schedule) for schedule in ("gpipe", "1f1b", "interleaved-1f1b"))],
)
def test_checkpointed_stages_keep_their_inputs(monkeypatch, model, sample, schedule):
    compare(monkeypatch, model, sample, schedule, checkpoint="always")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["convolutions"])
@pytest.mark.parametrize("word", ["recompute", "recompute-cheap"])
def test_convolutions_that_run_again_keep_their_inputs(monkeypatch, model, sample, word):
    layers = [str(place) for place in range(1, len(model) - 3)]
    compare(monkeypatch, model, sample, "1f1b", checkpoint=dict.fromkeys(layers, word))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["unet"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_tensor_that_skips_stages_counts_on_each_stage_that_passes_it_on(monkeypatch, model, sample, schedule):
    compare(monkeypatch, model, sample, schedule, most=math.inf, devices=["cpu"] * 4)  # all are never so late at once


@pytest.mark.parametrize("name", ["tied"])
def test_the_state_of_their_optimizers_is_that_of_all_their_parameters(monkeypatch, model, sample):
    compare(monkeypatch, model, sample, "1f1b", optimizer=lambda params: torch.optim.Adam(params, lr=0.1))


@pytest.mark.exhaustive
def test_asking_leaves_parameters_gradients_buffers_and_hooks_alone():
    for name in ("residual", "unet", "attends", "tied", "loose", "towers", "repeated", "recurrent"):
        model, *_ = made(name)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        objects, fired = list(model.parameters()), []
        for parameter in objects:
            parameter.register_post_accumulate_grad_hook(fired.append)
        state = torch.get_rng_state()
        with pipeline(name, model, devices=["cpu"] * 2) as pipe:
            assert len(pipe.predicted_memory) == 2
            assert all(one is other for one, other in zip(model.parameters(), objects, strict=True))
            assert not fired
            assert all(parameter.grad is None for parameter in objects)
            assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
            assert torch.equal(torch.get_rng_state(), state)
            args, kwargs, target = inputs_of(name, 9)
            pipe.step(*args, **kwargs, **target)
            assert fired


def test_a_model_whose_own_loss_counts_is_asked_with_its_loss(monkeypatch):
    torch.manual_seed(0)
    text = torch.arange(ROWS * 40).view(ROWS, 40) % 12
    choices = {"devices": ["cpu"] * 2, "num_microbatches": 2, "boundaries": ["blocks.1"], "seed": 1}
    with Pipeline(Tied(), {"text": text, "labels": text}, schedule="1f1b", **choices) as pipe:
        check(pipe, lambda: pipe.step(text=text.repeat(2, 1), labels=text.repeat(2, 1)), monkeypatch)


def test_the_losses_of_all_micro_batches_live_until_the_step_ends():
    """A captured model with a loss of its own, and a row of layers: each counts the scalars of its micro-batches."""
    text = torch.arange(8).view(1, 8) % 12
    choices = {"devices": ["cpu"] * 2, "seed": 1}
    row = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for make, boundaries in (
        (lambda: (Tied(), {"text": text, "labels": text}, None), ["blocks.1"]),
        (lambda: (copy.deepcopy(row), torch.rand(1, 4), functional.mse_loss), ["1"]),
    ):
        buffers = {}
        for count in (2, 16, 200):
            model, sample, loss_fn = make()
            with Pipeline(
                model,
                sample,
                loss_fn=loss_fn,
                schedule="1f1b",
                num_microbatches=count,
                boundaries=boundaries,
                **choices,
            ) as pipe:
                buffers[count] = [own.buffers for own in pipe.predicted_memory]
        assert buffers[2] == buffers[16]
        assert buffers[2][1] >= 16 * 4  # of float32
        assert buffers[200][1] - buffers[16][1] == (200 - 16) * 8
        assert buffers[200][0] == buffers[2][0]


def test_no_loss_of_an_earlier_step_is_counted_beside_those_of_this_one():
    """Where losses are held longer than a step, the count of living scalars grows with the steps."""
    torch.manual_seed(0)
    text = torch.arange(ROWS * 40).view(ROWS, 40) % 12
    choices = {"devices": ["cpu"] * 2, "num_microbatches": 2, "boundaries": ["blocks.1"], "seed": 1}
    gc.collect()
    gc.disable()
    try:
        with Pipeline(Tied(), {"text": text, "labels": text}, schedule="1f1b", **choices) as pipe:
            (_, own), held = pipe.predicted_memory, []
            with MemoryMeter(pipe) as meter:
                for _ in range(4):
                    pipe.step(text=text.repeat(2, 1), labels=text.repeat(2, 1))
                    pipe.zero_grad()
                    held.append(meter._books[1].bytes)
            assert len({*held}) == 1, held
            assert own.total_bytes >= held[0]
    finally:
        gc.enable()
