"""What training needs of a device: autograd's streams, autocast, the scaler, checkpoints and random numbers."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

DEVICE = "sim:0"


@pytest.mark.parametrize("own_threads", [True, False])
def test_a_backward_runs_on_the_streams_of_its_forward(sim, own_threads):
    """Also in autograd's own threads, whose launches have the place of the call to backward()."""
    sim.judge.spans = []
    one, other = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)

    def train():
        with torch.autograd.set_multithreading_enabled(own_threads):
            with one:
                weight = torch.ones(3, 3, device=DEVICE, requires_grad=True)
                hidden = weight @ weight
            other.wait_stream(one)
            with other:
                loss = hidden.exp().sum()
            torch.accelerator.current_stream(DEVICE).wait_stream(other)
            sim.judge.spans.clear()
            loss.backward()
            weight.grad.sum().item()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    streams = {name: span.stream for span in sim.judge.spans for name in [span.name]}
    assert streams["aten::mm"].endswith(f"stream {one.stream_id}")
    assert streams["aten::mul"].endswith(f"stream {other.stream_id}")
    assert not sim.judge.violations


def test_what_the_host_knows_holds_in_autograds_threads(sim):
    side = torch.Stream(device=DEVICE)
    weight = torch.ones(3, device=DEVICE, requires_grad=True)
    with side:
        factor = torch.ones(3, device=DEVICE) * 2
    side.synchronize()
    (weight * factor).sum().backward()
    assert not sim.judge.violations


def test_autocast_casts_as_on_cuda():
    layer = nn.Linear(6, 3).to(DEVICE)
    with torch.autocast("sim", torch.bfloat16):
        output = layer(torch.ones(4, 6, device=DEVICE))
        loss = F.cross_entropy(output, torch.zeros(4, dtype=torch.long, device=DEVICE))
    loss.backward()
    assert (output.dtype, loss.dtype, layer.weight.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)


def test_the_scaler_skips_a_step_with_infinite_gradients(sim):
    layer = nn.Linear(2, 1, bias=False).to(DEVICE)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    scaler = torch.amp.GradScaler("sim", init_scale=4.0)
    before = layer.weight.detach().clone()
    for factor, moves in ((float("inf"), False), (1.0, True)):
        optimizer.zero_grad()
        scaler.scale(layer(torch.ones(1, 2, device=DEVICE)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(layer.weight, before) != moves
    assert scaler.get_scale() == 2.0
    assert not sim.judge.violations


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_draws_the_dropout_again(sim, reentrant):
    layers = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)).to(DEVICE)
    x = torch.ones(4, 6, device=DEVICE, requires_grad=True)
    grads = []
    for run in (layers, lambda x: checkpoint(layers, x, use_reentrant=reentrant)):
        torch.manual_seed(3)
        x.grad = None
        run(x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
    assert not sim.judge.violations


def test_generators_draw_the_numbers_of_a_cpu():
    own, cpu = torch.Generator(DEVICE).manual_seed(5), torch.Generator().manual_seed(5)
    assert own.device == torch.device(DEVICE)
    assert torch.equal(torch.rand(4, device=DEVICE, generator=own).cpu(), torch.rand(4, generator=cpu))
    state = own.get_state()
    first = torch.randn(4, device=DEVICE, generator=own)
    own.set_state(state)
    assert torch.equal(torch.randn(4, device=DEVICE, generator=own), first)


def test_each_device_has_a_default_generator():
    torch.manual_seed(3)
    first = F.dropout(torch.ones(100, device="sim:1"))
    state = torch.sim.get_rng_state("sim:1")
    other = F.dropout(torch.ones(100, device="sim:1"))
    torch.sim.set_rng_state(state, "sim:1")
    torch.rand(9, device="sim:0")
    assert torch.equal(F.dropout(torch.ones(100, device="sim:1")), other)
    torch.manual_seed(3)
    assert torch.equal(F.dropout(torch.ones(100, device="sim:1")), first)
    with torch.random.fork_rng([1], device_type="sim"):
        torch.rand(3, device="sim:1")


@pytest.mark.parametrize("device", ["cpu", "sim:1"])
def test_a_generator_of_another_device_is_refused(device):
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(4, device="sim:0", generator=torch.Generator(device))
