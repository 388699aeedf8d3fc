"""Threads: when they live and end, and several pipelines at once."""

import copy
import gc
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

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


def threads_of(build):
    """What build returns, and the threads that it started."""
    before = set(threading.enumerate())
    built = build()
    return built, set(threading.enumerate()) - before


def test_threads_live_from_construction_to_close():
    pipe, threads = threads_of(lambda: pipeline(linears(), rows(2), 3, loss_fn=mse))
    assert len(threads) == 3
    for _ in range(3):
        _, more = threads_of(lambda: pipe.step(rows(), target=rows(seed=2)))
        assert not more
    pipe.close()
    assert not any(thread.is_alive() for thread in threads)
    pipe.close()


def test_every_rank_computes_in_a_thread_of_its_own_also_on_one_device():
    seen = {}
    model = nn.Sequential(*(Function(lambda x, i=i: seen.setdefault(i, threading.get_ident()) and x) for i in range(3)))
    with pipeline(model, rows(2), 3) as pipe, torch.no_grad():
        pipe(rows())
    assert len(set(seen.values()) | {threading.get_ident()}) == 4


@pytest.mark.parametrize("after", ["nothing", "a step", "an open pass", "an error"])
def test_dropping_a_pipeline_ends_its_threads(after):
    fuse = Raising()
    pipe, threads = threads_of(
        lambda: pipeline(nn.Sequential(nn.Linear(4, 4), fuse), rows(2), loss_fn=mse, num_microbatches=2)
    )
    if after == "a step":
        pipe.step(rows(), target=rows(seed=2))
    elif after == "an open pass":
        pipe(rows())
    elif after == "an error":
        fuse.armed = True
        with pytest.raises(Oops):
            pipe.step(rows(), target=rows(seed=2))
    del pipe
    gc.collect()
    for thread in threads:
        thread.join(timeout=30)
    assert len(threads) == 2
    assert not any(thread.is_alive() for thread in threads)


def test_a_with_block_that_raises_closes_the_pipeline():
    def use():
        with pipeline(linears(), rows(2), loss_fn=mse):
            raise Oops

    before = set(threading.enumerate())
    with pytest.raises(Oops):
        use()
    assert not set(threading.enumerate()) - before


@pytest.mark.exhaustive  # test_exits.py ends such a script while a stream is under way
def test_a_program_that_forgets_to_close_still_ends():
    script = """
import torch, pipesched
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
pipe = pipesched.Pipeline(model, torch.ones(1, 2), devices=["cpu"] * 2, loss_fn=torch.nn.functional.mse_loss)
pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))
print("ready")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "ready\n"), done.stderr


def test_several_pipelines_live_and_step_at_once():
    models = [linears(seed=seed) for seed in range(3)]
    bares = copy.deepcopy(models)
    pipes = [
        pipeline(model, rows(2), loss_fn=mse, schedule=name, num_microbatches=4)
        for model, name in zip(models, ["gpipe", "1f1b", "zb-h1"], strict=True)
    ]
    try:
        users = [
            threading.Thread(target=lambda p=pipe: [p.step(rows(), target=rows(seed=2)) for _ in range(5)])
            for pipe in pipes
        ]
        for user in users:
            user.start()
        for user in users:
            user.join()
    finally:
        for pipe in pipes:
            pipe.close()
    for model, bare in zip(models, bares, strict=True):
        for _ in range(5):
            reference_step(bare, rows(), loss_fn=mse, target=rows(seed=2), num_microbatches=4)
        assert_equal_bits(grads(model), grads(bare))


def test_two_pipelines_may_share_a_model_and_cut_it_differently():
    model = linears()
    with (
        pipeline(model, rows(2), boundaries=[1], loss_fn=mse, num_microbatches=4) as first,
        pipeline(model, rows(2), boundaries=[2, 3], loss_fn=mse, schedule="gpipe", num_microbatches=4) as second,
    ):
        results = []
        for pipe in (first, second, first):
            pipe.zero_grad()
            loss = pipe.step(rows(), target=rows(seed=2))
            results.append({name: grad.clone() for name, grad in grads(model).items()} | {"loss": loss})
    assert_equal_bits(results[1], results[0])
    assert_equal_bits(results[2], results[0])
