"""Errors in a stage, and steps at the wrong moment."""

import copy
import inspect
import re
import threading
import time
import traceback
from collections import Counter

import pytest
import torch
from torch import nn

from pipesched import Pipeline
from pipesched.errors import ExecutionError
from pipesched.testing import reference_step
from tests.support.peer_cases import (
    Function,
    Oops,
    Raising,
    assert_equal_bits,
    grads,
    linears,
    mse,
    pipeline,
    rows,
)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_an_exception_keeps_its_type_and_traceback_and_says_where_it_happened(schedule):
    fuse = Raising(call=2)
    with pipeline(
        nn.Sequential(nn.Linear(4, 4), fuse), rows(2), loss_fn=mse, schedule=schedule, num_microbatches=4
    ) as pipe:
        fuse.armed = True
        with pytest.raises(Oops, match="the 7th fuse") as caught:
            pipe.step(rows(), target=rows(seed=2))
    assert any(
        frame.name == "forward" and frame.filename == inspect.getfile(Raising)
        for frame in traceback.extract_tb(caught.tb)
    )
    (note,) = caught.value.__notes__
    assert re.search(r"1F2 \(stage 1, micro-batch 2\), rank 1", note)


def test_an_exception_in_a_backward_says_where_it_happened():
    class Refuse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise Oops

    model = nn.Sequential(nn.Linear(4, 4), Function(Refuse.apply))
    with (
        Pipeline(model, rows(2), devices=["cpu"] * 2, boundaries=[1], loss_fn=mse) as pipe,
        pytest.raises(Oops) as caught,
    ):
        pipe.step(rows(), target=rows(seed=2))
    assert "1B0 (stage 1, micro-batch 0), rank 1" in caught.value.__notes__[0]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_after_an_exception_nothing_hangs_and_the_next_step_is_right(at, schedule):
    fuse, layers = Raising(call=1), list(linears(3))
    layers.insert(at + 1, fuse)
    model = nn.Sequential(*layers)
    bare = copy.deepcopy(model)
    with pipeline(model, rows(2), 3, loss_fn=mse, schedule=schedule, checkpoint="always", num_microbatches=4) as pipe:
        fuse.armed = True
        with pytest.raises(Oops):
            pipe.step(rows(), target=rows(seed=2))
        fuse.armed = False
        pipe.zero_grad()
        loss = pipe.step(rows(), target=rows(seed=2))
    assert_equal_bits(loss, reference_step(bare, rows(), loss_fn=mse, target=rows(seed=2), num_microbatches=4))
    assert_equal_bits(grads(model), grads(bare))


def test_an_exception_stops_the_other_ranks_early():
    """The first stage does not run its 500 micro-batches, of 2 ms each, to the end."""
    calls, fuse = Counter(), Raising()
    model = nn.Sequential(Function(lambda x: calls.update(["first"]) or time.sleep(0.002) or x), fuse, nn.Linear(4, 4))
    with pipeline(model, rows(1), boundaries=[1], loss_fn=mse, schedule="gpipe", num_microbatches=500) as pipe:
        calls.clear()
        fuse.armed = True
        with pytest.raises(Oops):
            pipe.step(rows(500), target=rows(500))
    assert calls["first"] < 500


def test_one_step_at_a_time():
    """A layer that calls step gets an error; the step under way is not disturbed."""
    caught = []

    def reenter(x):
        if pipes and not caught:
            try:
                pipes[0].step(rows(), target=rows(seed=2))
            except ExecutionError as error:
                caught.append(str(error))
        return x

    pipes = []
    model = nn.Sequential(nn.Linear(4, 4), Function(reenter), nn.Linear(4, 4))
    with pipeline(model, rows(2), loss_fn=mse, num_microbatches=4) as pipe:
        pipes.append(pipe)
        loss = pipe.step(rows(), target=rows(seed=2))
        pipes.clear()
    assert len(caught) == 1
    assert "may run only one call at a time" in caught[0]
    assert_equal_bits(
        loss, reference_step(copy.deepcopy(model), rows(), loss_fn=mse, target=rows(seed=2), num_microbatches=4)
    )


def test_a_second_thread_may_not_step_at_the_same_time():
    inside, leave = threading.Event(), threading.Event()

    def block(x):
        if blocking:
            inside.set()
            assert leave.wait(30)
        return x

    blocking = []
    with pipeline(nn.Sequential(nn.Linear(4, 4), Function(block)), rows(2), loss_fn=mse) as pipe:
        blocking.append(True)
        other = threading.Thread(target=lambda: pipe.step(rows(), target=rows(seed=2)))
        other.start()
        assert inside.wait(30)
        try:
            with pytest.raises(ExecutionError, match="may run only one call at a time"):
                pipe.step(rows(), target=rows(seed=2))
        finally:
            leave.set()
            other.join()
