"""Divided layers: runs a model whole and divided among ranks, and compares outputs and gradients."""

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pipesched.parallel.dropout import DividedRandom
from pipesched.parallel.styles import split_model
from pipesched.parallel.tensor_group import TensorGroup
from pipesched.tensors.function_mode import Intercept
from pipesched.tensors.keyed_random import Key, KeyedRandom

CPU = torch.device("cpu")
EXACT = {torch.float64: 1e-12, torch.float32: 1e-5}


@dataclass
class Results:
    """What a forward and a backward give."""

    outputs: list[Tensor] = field(default_factory=list)
    input_grads: list[Tensor] = field(default_factory=list)
    weight_grads: dict[str, Tensor] = field(default_factory=dict)

    def difference(self, other: "Results") -> float:
        """The largest difference between two results, relative to the largest number of each tensor.

        Gradients that are 0 but for rounding, such as those of the biases of keys, are compared with all gradients.
        """
        assert self.weight_grads.keys() == other.weight_grads.keys()
        least = 1e-4 * max((grad.abs().max().item() for grad in other.weight_grads.values()), default=0)
        pairs = [
            *zip(self.outputs, other.outputs, strict=True),
            *zip(self.input_grads, other.input_grads, strict=True),
            *((grad, other.weight_grads[name]) for name, grad in self.weight_grads.items()),
        ]
        return max(_difference(one, another, least) for one, another in pairs)


def _difference(one, another, least):
    assert one.shape == another.shape, (one.shape, another.shape)
    scale = max(another.abs().max().item(), least)
    gap = (one - another).abs().max().item()
    return gap / scale if scale else gap


def run(model, args, kwargs, random, *, backward=True, counter=None):
    """Run a model in a stage's function mode, with a loss that weighs each number of its output differently."""
    random.enter(Key(7, 1, 0), "layer")
    args = [arg.detach().clone().requires_grad_() if arg.is_floating_point() else arg for arg in args]
    during = counter.during if counter else lambda name: torch.enable_grad()
    with Intercept(random), during("F"):
        outputs = tensors(model(*args, **kwargs))
    if not backward:
        return Results([output.detach() for output in outputs])
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output) for output in outputs]
    loss = sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True))
    with during("B"):
        loss.backward()
    return Results(
        [output.detach() for output in outputs],
        [arg.grad for arg in args if arg.requires_grad and arg.grad is not None],
        {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None},
    )


def tensors(output):
    """The tensors with gradients of a model's output."""
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, dict) else output
    return [value for value in values if isinstance(value, Tensor) and value.requires_grad]


def whole(results, splits):
    """The results with gradients of whole weights, gathered from all ranks."""
    grads = {name: splits.whole(name, grad) for name, grad in results.weight_grads.items()}
    return Results(results.outputs, results.input_grads, grads)


def grouped(process_group, size, **options):
    """The tensor group of a process group, in a process of `Ranks`."""
    return TensorGroup(process_group, rank=torch.distributed.get_rank(process_group), size=size, **options)


def compared(process_group, size, make, wanted, dtype=torch.float64, **options):
    """Run ``make(dtype)`` -> (model, args, kwargs) whole and divided; return the difference and the traffic."""
    torch.manual_seed(0)
    model, args, kwargs = make(dtype)
    divided = copy.deepcopy(model)
    expected = run(model, args, kwargs, KeyedRandom(CPU))
    group = grouped(process_group, size, **options)
    splits = split_model(divided, wanted, group)
    results = run(divided, args, kwargs, DividedRandom(CPU, group), counter=group.counter)
    traffic = dict(group.counter.traffic)
    return whole(results, splits).difference(expected), traffic


class Perceptron(nn.Module):
    """Two linear layers with an activation and dropouts, with a norm before and a residual connection."""

    def __init__(self, width=16, hidden=32, rate=0.3, dtype=torch.float64):
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.up = nn.Linear(width, hidden, dtype=dtype)
        self.down = nn.Linear(hidden, width, dtype=dtype)
        self.inner = nn.Dropout(rate)
        self.outer = nn.Dropout(rate)

    def forward(self, x):
        return x + self.outer(self.down(self.inner(nn.functional.gelu(self.up(self.norm(x))))))
