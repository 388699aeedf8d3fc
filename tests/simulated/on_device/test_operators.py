"""Operators on a simulated device have the bits of the CPU, forward and backward."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

DEVICE = "sim:1"


def drawn(*shape, dtype=None):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


MATRIX, SQUARE, IMAGE = drawn(5, 6), drawn(6, 6), drawn(2, 3, 8, 8)
WHOLE = torch.randint(0, 5, (4, 7), generator=torch.Generator().manual_seed(3))
TARGET = torch.tensor([0, 2, 4, 1, 3])
POSITIVE = SQUARE @ SQUARE.T + torch.eye(6)

FUNCTIONS = {
    "unary": lambda x: [
        f(x) for f in (torch.exp, torch.sigmoid, torch.tanh, torch.erf, torch.sin, torch.abs, torch.neg)
    ],
    "activations": lambda x: [
        f(x) for f in (F.relu, F.gelu, F.silu, F.softplus, F.elu, F.leaky_relu, F.hardswish, F.mish)
    ],
    "arithmetic": lambda x: [
        x + 1,
        2 - x,
        x * x,
        x / (x.abs() + 1),
        x**2,
        torch.remainder(x, 0.7),
        torch.lerp(x, x * 2, 0.3),
    ],
    "comparisons": lambda x: [x > 0, x.eq(x), torch.where(x > 0, x, -x), torch.maximum(x, -x), x.clamp(-0.5, 0.5)],
    "reductions": lambda x: [
        x.sum(),
        x.mean(0),
        x.std(),
        x.var(1),
        x.amax(1),
        x.prod(),
        x.logsumexp(0),
        x.norm(),
        x.cumsum(1),
    ],
    "indices of extremes": lambda x: [*x.max(1), *x.min(0), x.argmax(), *x.topk(2), *x.sort(), x.median()],
    "products": lambda x: [
        x @ SQUARE.to(x),
        torch.mm(x, x.T),
        torch.addmm(x, x, SQUARE.to(x)),
        x.mv(x[0]),
        torch.einsum("ij,kj->ik", x, x),
    ],
    "batched products": lambda x: [
        torch.bmm(x.expand(3, 5, 6), x.T.expand(3, 6, 5)),
        torch.matmul(x, x.T.expand(2, 6, 5)),
    ],
    "softmax": lambda x: [x.softmax(1), x.log_softmax(0), F.gumbel_softmax(x * 0, hard=False) * 0],
    "norms": lambda x: [F.layer_norm(x, (6,)), F.normalize(x), F.rms_norm(x, (6,)), F.group_norm(x.view(1, 6, 5), 2)],
    "losses": lambda x: [
        F.cross_entropy(x, TARGET.to(x.device)),
        F.mse_loss(x, x * 2),
        F.l1_loss(x, -x),
        F.smooth_l1_loss(x, -x),
        F.kl_div(x.log_softmax(1), x.softmax(1), reduction="batchmean"),
        F.binary_cross_entropy_with_logits(x, x.sigmoid()),
        F.nll_loss(x.log_softmax(1), TARGET.to(x.device)),
        F.huber_loss(x, -x),
    ],
    "shapes": lambda x: [
        x.view(6, 5),
        x.reshape(3, 10),
        x.T.contiguous(),
        x.unsqueeze(0).expand(3, 5, 6).clone(),
        x.flip(0),
        x.roll(1, 0),
        torch.cat([x, x]),
        torch.stack([x, x], 1),
        *x.split(2),
        *x.chunk(3, 1),
        x.repeat(2, 2),
        x.tril(),
        x.diagonal().clone(),
        F.pad(x, (1, 2)),
        x.movedim(0, 1) * 1,
        torch.meshgrid(x[0], x[1], indexing="ij")[0] * 1,
    ],
    "indexing": lambda x: [
        x[1],
        x[:, ::2],
        x[..., -1],
        x[TARGET.to(x.device) % 5],
        x[x > 0],
        x.gather(1, TARGET.to(x.device)[:, None]),
        x.index_select(0, TARGET.to(x.device)),
        x.take(TARGET.to(x.device)),
        x.masked_fill(x > 0, 0.0),
        x[[0, 2], [1, 3]],
    ],
    "scattering": lambda x: [
        torch.zeros_like(x).scatter_add(0, WHOLE[:, :6].to(x.device) % 5, x),
        x.index_add(0, TARGET.to(x.device), x),
        torch.zeros_like(x).index_put((TARGET.to(x.device),), x, accumulate=True),
        x.index_copy(0, TARGET.to(x.device), x),
    ],
    "linear algebra": lambda x: [
        torch.linalg.cholesky(POSITIVE.to(x)),
        torch.linalg.inv(POSITIVE.to(x)),
        torch.linalg.solve(POSITIVE.to(x), x.T),
        torch.linalg.vector_norm(x),
        torch.linalg.qr(x)[1],
    ],
    "rounding and types": lambda x: [
        x.half().float(),
        x.bfloat16().float(),
        x.double().float(),
        x.round(),
        x.long(),
        x.bool(),
    ],
}


class Twice(nn.Module):
    """Gives its input to both arguments of a layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, x)


class CausalAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        query, key, value = self.qkv(x).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.lstm, self.rnn = nn.GRUCell(4, 4), nn.LSTMCell(4, 4), nn.RNNCell(4, 4)

    def forward(self, x):
        return self.rnn(self.lstm(self.gru(x))[0])


MODULES = {
    "linear": (lambda: nn.Linear(6, 4), MATRIX),
    "linear of three dimensions": (lambda: nn.Linear(6, 4), drawn(2, 5, 6)),
    "bilinear": (lambda: Twice(nn.Bilinear(6, 6, 3)), MATRIX),
    "embedding": (lambda: nn.Embedding(5, 3, padding_idx=1), WHOLE),
    "embedding bag": (lambda: nn.EmbeddingBag(5, 3), WHOLE),
    "layer norm": (lambda: nn.LayerNorm(6), MATRIX),
    "batch norm": (lambda: nn.BatchNorm2d(3), IMAGE),
    "group and instance norm": (lambda: nn.Sequential(nn.GroupNorm(3, 3), nn.InstanceNorm2d(3, affine=True)), IMAGE),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, groups=3), nn.ReLU(), nn.Conv2d(6, 2, 1)),
        IMAGE,
    ),
    "transposed convolution": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), IMAGE),
    "convolutions of other dimensions": (lambda: nn.Conv1d(3, 4, 3, dilation=2, bias=False), drawn(2, 3, 9)),
    "pooling": (lambda: nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1)), IMAGE),
    "upsampling": (
        lambda: nn.Sequential(nn.Upsample(scale_factor=2), nn.Upsample(scale_factor=2, mode="bilinear")),
        IMAGE,
    ),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), drawn(2, 5, 8)),
    "decoder": (lambda: Twice(nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)), drawn(2, 5, 8)),
    "causal attention": (CausalAttention, drawn(2, 5, 8)),
    "gru": (lambda: nn.GRU(4, 6, 2), drawn(3, 2, 4)),
    "lstm": (lambda: nn.LSTM(4, 6, bidirectional=True, batch_first=True), drawn(3, 2, 4)),
    "lstm with projections": (lambda: nn.LSTM(4, 6, proj_size=2), drawn(3, 2, 4)),
    "rnn": (lambda: nn.RNN(4, 6, nonlinearity="relu"), drawn(3, 2, 4)),
    "cells": (Cells, drawn(2, 4)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), MATRIX),
    "dropout": (lambda: nn.Sequential(nn.PReLU(), nn.Dropout(0.1), nn.AlphaDropout(0.2)), MATRIX),
}


def trained(model, x, device):
    """The outputs of a model on a device, and all its gradients, on the CPU."""
    model = copy.deepcopy(model).to(device)
    x = x.clone().to(device)
    if x.is_floating_point():
        x.requires_grad_()
    torch.manual_seed(5)
    output = model(x)
    output = output[0] if isinstance(output, tuple) else output
    output.pow(2).sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"output": output.detach(), "input": x.grad, **grads, **dict(model.named_buffers())}


def assert_same_bits(given, wanted):
    for one, (place, other) in zip(given, enumerate(wanted), strict=True):
        assert one.device == torch.device(DEVICE)
        assert one.shape == other.shape, place
        assert one.stride() == other.stride(), place
        assert torch.equal(one.cpu().nan_to_num(), other.nan_to_num()), place


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_the_bits_of_the_cpu(sim, name):
    torch.manual_seed(0)
    given = FUNCTIONS[name](MATRIX.to(DEVICE))
    torch.manual_seed(0)
    assert_same_bits(given, FUNCTIONS[name](MATRIX))
    assert not sim.judge.violations


@pytest.mark.parametrize("name", MODULES)
def test_modules_have_the_bits_of_the_cpu(sim, name):
    make, x = MODULES[name]
    torch.manual_seed(0)
    model = make()
    wanted, given = trained(model, x, "cpu"), trained(model, x, DEVICE)
    assert {key for key, value in wanted.items() if value is not None} == {
        key for key, value in given.items() if value is not None
    }
    for key, value in wanted.items():
        assert value is None or torch.equal(given[key].cpu(), value), key
    assert not sim.judge.violations


@pytest.mark.parametrize(("name", "atol"), [("gru", 0.0), ("lstm", 1e-6), ("rnn", 0.0)])
def test_recurrent_layers_have_the_numbers_of_the_cpu_without_gradients(name, atol):
    """Also the bits, but for an LSTM: without gradients, a CPU may run that of oneDNN, which rounds otherwise."""
    make, x = MODULES[name]
    torch.manual_seed(0)
    model = make().eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            given = copy.deepcopy(model).to(DEVICE)(x.to(DEVICE))[0].cpu()
            torch.testing.assert_close(given, model(x)[0], rtol=0.0, atol=atol)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, 0.1, foreach=True),
        lambda p: torch.optim.AdamW(p, 0.1, foreach=False),
        lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
        lambda p: torch.optim.AdamW(p, 0.1, fused=True),
        torch.optim.Adafactor,
        lambda p: torch.optim.RMSprop(p, 0.1),
    ],
    ids=["SGD", "SGD foreach", "AdamW", "AdamW foreach", "AdamW fused", "Adafactor", "RMSprop"],
)
def test_optimizers_have_the_bits_of_the_cpu(sim, make):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    ends = []
    for device in ("cpu", DEVICE):
        own = copy.deepcopy(model).to(device)
        optimizer = make(own.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            own(MATRIX.to(device)).pow(2).mean().backward()
            nn.utils.clip_grad_norm_(own.parameters(), 0.1)
            optimizer.step()
        ends.append(own.weight.detach().cpu())
    assert torch.equal(*ends)
    assert not sim.judge.violations


def test_every_operator_of_aten_with_a_cpu_kernel_has_one(sim):
    """Some hundred operators take an own kernel or none: new tensors, copies, storages and fused cells."""
    assert sim.num_kernels > 1000


def test_complex_numbers_and_their_conjugates(sim):
    values = drawn(3, 4, dtype=torch.complex64)
    own = values.to(DEVICE)
    for change in (
        lambda x: x.conj(),
        lambda x: x.conj() * x,
        lambda x: x.conj()[1:].clone(),
        lambda x: x.conj().imag,
        lambda x: x.T.conj() @ x,
        torch.view_as_real,
        lambda x: torch.fft.fft(x, dim=1),
    ):
        assert torch.equal(change(own).cpu(), change(values).resolve_conj().resolve_neg())
    assert not sim.judge.violations
