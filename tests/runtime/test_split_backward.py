"""The split backward: I then W equals B to the bit, for any module, without running anything twice."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipesched.errors import ExecutionError
from pipesched.runtime.stage.stage import Stage
from pipesched.runtime.stage.step_data import StepData
from pipesched.tensors.payload import Payload
from tests.support.models import Scale, Scaled, assert_equal_bits, gradients

CPU = torch.device("cpu")


class Applied(nn.Module):
    """A weight, a bias, and a function of (x, weight, bias)."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight, self.bias = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(shape[-1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


class First(nn.Module):
    """The first of a layer's outputs."""

    def __init__(self, layer: nn.Module, *, copies: int = 1) -> None:
        super().__init__()
        self.layer, self.copies = layer, copies

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(*[x] * self.copies)[0]


class Tied(nn.Module):
    """One weight looked up, multiplied and added: not in products alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.embedding.weight.sum(0)
        return functional.linear(torch.tanh(x), self.embedding.weight) + functional.linear(x, self.embedding.weight)


class Checkpointed(nn.Module):
    """The user's own checkpointing inside a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.calls = 0

    def run(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False)


def rows(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape)


def tokens() -> Tensor:
    return torch.randint(0, 11, (3, 4))


def across(x: Tensor) -> Tensor:
    """The same numbers, not contiguous."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


# module, input, whether a weight gradient is left to W
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], bool]] = {
    "linear on a vector": (lambda: nn.Linear(6, 5), rows(6), True),
    "linear on rows": (lambda: nn.Linear(6, 5), rows(3, 6), True),
    "linear on tokens": (lambda: nn.Linear(6, 5), rows(3, 4, 6), True),
    "linear on four dims": (lambda: nn.Linear(6, 5), rows(2, 3, 4, 6), True),
    "linear without bias": (lambda: nn.Linear(6, 5, bias=False), rows(3, 4, 6), True),
    "linear on strided tokens": (lambda: nn.Linear(6, 5), lambda: across(torch.randn(3, 4, 6)), True),
    "linear on strided tokens without bias": (
        lambda: nn.Linear(6, 5, False),
        lambda: across(torch.randn(3, 4, 6)),
        True,
    ),
    "linear on strided rows": (lambda: nn.Linear(6, 5), lambda: across(torch.randn(3, 6)), True),
    "x @ weight": (lambda: Applied(lambda x, w, b: x @ w + b, 6, 5), rows(3, 4, 6), True),
    "matmul of strided tokens": (
        lambda: Applied(lambda x, w, b: torch.matmul(x, w) + b, 6, 5),
        lambda: across(torch.randn(3, 4, 6)),
        True,
    ),
    "mm": (lambda: Applied(lambda x, w, b: torch.mm(x, w) * b, 6, 5), rows(3, 6), True),
    "addmm": (lambda: Applied(lambda x, w, b: torch.addmm(b, x, w), 6, 5), rows(3, 6), True),
    "weight @ x": (lambda: Applied(lambda x, w, b: w @ x + b.sum(), 5, 6), rows(6, 3), False),
    "product with a transposed weight": (lambda: Applied(lambda x, w, b: x @ w.t() + b.sum(), 5, 6), rows(3, 6), False),
    "convolution 1d": (lambda: nn.Conv1d(4, 6, 3, stride=2), rows(2, 4, 9), True),
    "convolution 2d": (lambda: nn.Conv2d(4, 6, 3, padding=1), rows(2, 4, 8, 8), True),
    "convolution 2d without bias, dilated": (
        lambda: nn.Conv2d(4, 6, 3, dilation=2, bias=False),
        rows(2, 4, 8, 8),
        True,
    ),
    "convolution 2d of one picture": (lambda: nn.Conv2d(4, 6, 3), rows(4, 8, 8), True),
    "convolution 3d": (lambda: nn.Conv3d(2, 3, (1, 2, 3)), rows(2, 2, 4, 4, 4), True),
    "grouped convolution": (lambda: nn.Conv2d(8, 8, 3, groups=4), rows(2, 8, 8, 8), True),
    "depthwise convolution": (lambda: nn.Conv2d(8, 8, 3, groups=8), rows(2, 8, 8, 8), True),
    "convolution padded to the same size": (lambda: nn.Conv2d(4, 6, 3, padding="same"), rows(2, 4, 8, 8), False),
    "convolution that pads in circles": (
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
        rows(2, 4, 8, 8),
        True,
    ),
    "transposed convolution": (lambda: nn.ConvTranspose2d(4, 6, 3), rows(2, 4, 8, 8), False),
    "embedding": (lambda: nn.Embedding(11, 6), tokens, False),
    "layer norm": (lambda: nn.LayerNorm(6), rows(3, 4, 6), False),
    "LSTM": (lambda: First(nn.LSTM(6, 5, num_layers=2, batch_first=True)), rows(3, 4, 6), False),
    "GRU": (lambda: First(nn.GRU(6, 5)), rows(3, 4, 6), False),
    "attention": (lambda: First(nn.MultiheadAttention(6, 2, batch_first=True), copies=3), rows(3, 4, 6), True),
    "attention, sequence first": (lambda: First(nn.MultiheadAttention(6, 2), copies=3), rows(3, 4, 6), True),
    "custom function": (lambda: nn.Sequential(nn.Linear(6, 6), Scaled(6)), rows(3, 4, 6), True),
    "normalised weight": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), rows(3, 6), False),
    "bilinear": (lambda: First(nn.Bilinear(6, 6, 5), copies=2), rows(3, 6), False),
    "a weight in many ways": (Tied, tokens, False),
    "checkpointed by the user": (Checkpointed, rows(3, 6), True),
    "transformer layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True),
        rows(3, 4, 8),
        True,
    ),
}


def make(case: str) -> tuple[Stage, nn.Module, list[Payload]]:
    build, sample, _ = CASES[case]
    torch.manual_seed(0)
    module = build()
    given = [sample() for _ in range(3)]
    return (
        Stage({"layer": module}, CPU),
        module,
        [Payload.of(x.requires_grad_() if x.is_floating_point() else x) for x in given],
    )


def ones(output: Payload) -> tuple[Tensor, ...]:
    return tuple(torch.linspace(0.5, 1.5, tensor.numel()).view_as(tensor) for tensor in output.wanted)


def run(case: str, split: bool, checkpointed: bool = False) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Three micro-batches, all in flight; weight gradients last. Gradients of weights, and of inputs."""
    stage, module, given = make(case)
    stage.begin(StepData(3, 1, []))
    outputs = [stage.forward(m, x, split=split, checkpointed=checkpointed) for m, x in enumerate(given)]
    sent = []
    for microbatch, output in enumerate(outputs):
        if checkpointed:
            stage.recompute(microbatch, split=split)
        sent += (stage.input_grad if split else stage.backward)(microbatch, ones(output))
    if split:
        for microbatch in range(3):
            stage.weight_grad(microbatch)
    assert len(stage._saved) == 0
    return gradients(module), [grad for grads in sent for grad in grads]


@pytest.mark.one_in(4)
@pytest.mark.usefixtures("every_product_deferred")
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_split_equals_whole_to_the_bit(case: str, checkpointed: bool) -> None:
    weights, inputs = run(case, split=True, checkpointed=checkpointed)
    whole_weights, whole_inputs = run(case, split=False)
    assert_equal_bits(weights, whole_weights)
    assert all(torch.equal(a, b) for a, b in zip(inputs, whole_inputs, strict=True))


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("every_product_deferred")
@pytest.mark.parametrize("case", CASES)
def test_weight_gradients_are_deferred_to_w_if_that_pays(case: str) -> None:
    stage, module, given = make(case)
    stage.begin(StepData(0, 0, []))
    stage.forward(0, given[0], split=True)  # learnt from
    output = stage.forward(1, given[1], split=True)
    stage.input_grad(1, ones(output))
    left = [p for p in module.parameters() if p.grad is None]
    stage.weight_grad(1)
    assert bool(left) == CASES[case][2]
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_small_products_are_done_at_once() -> None:
    stage, module, given = make("linear on rows")
    stage.begin(StepData(0, 0, []))
    stage.forward(0, given[0], split=True)
    stage.input_grad(1, ones(stage.forward(1, given[1], split=True)))
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.usefixtures("every_product_deferred")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_split_backward_runs_no_layer_twice(checkpointed: bool) -> None:
    class Counted(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Counted.calls += 1
            return super().forward(x)

    torch.manual_seed(0)
    stage = Stage({"a": Counted(6, 6), "b": Scaled(6)}, CPU)
    stage.begin(StepData(0, 0, []))
    Counted.calls = Scale.calls = 0
    for microbatch in range(4):
        output = stage.forward(
            microbatch, Payload.of(torch.randn(3, 6, requires_grad=True)), split=True, checkpointed=checkpointed
        )
        if checkpointed:
            stage.recompute(microbatch, split=True)
        stage.input_grad(microbatch, ones(output))
        stage.weight_grad(microbatch)
    assert Counted.calls == (8 if checkpointed else 4)
    assert Scale.calls == 4


@pytest.mark.usefixtures("every_product_deferred")
def test_a_users_checkpoint_recomputes_once() -> None:
    stage, module, given = make("checkpointed by the user")
    stage.begin(StepData(0, 0, []))
    for microbatch, x in enumerate(given):
        stage.input_grad(microbatch, ones(stage.forward(microbatch, x, split=True)))
        stage.weight_grad(microbatch)
    assert isinstance(module, Checkpointed)
    assert module.calls == 2 * len(given)


@pytest.mark.usefixtures("every_product_deferred")
def test_hooks_fire_once_on_the_whole_gradient() -> None:
    def trained(split: bool) -> tuple[dict[str, Tensor], list[str]]:
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        fired: list[str] = []
        for name, parameter in layer.named_parameters():
            parameter.register_hook(lambda grad, name=name: fired.append(f"hook {name}") or grad * 2)
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(f"accumulated {name}"))
        node = layer[0].weight.expand_as(layer[0].weight).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_: fired.append("node"))
        layer[2].register_full_backward_hook(lambda *_: fired.append("module"))
        layer.register_forward_hook(lambda *_: fired.append("forward"))
        stage = Stage({"layer": layer}, CPU)
        stage.begin(StepData(0, 0, []))
        for microbatch in range(3):
            output = stage.forward(microbatch, Payload.of(torch.ones(2, 6, requires_grad=True)), split=split)
            (stage.input_grad if split else stage.backward)(microbatch, ones(output))
            if split:
                stage.weight_grad(microbatch)
        return gradients(layer), sorted(fired)

    split, whole = trained(True), trained(False)
    assert_equal_bits(split[0], whole[0])
    assert split[1] == whole[1]
    assert split[1].count("hook 0.weight") == 3


@pytest.mark.usefixtures("every_product_deferred")
def test_frozen_weights_have_no_weight_gradient_work() -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    layer[0].requires_grad_(False)
    stage = Stage({"layer": layer}, CPU)
    stage.begin(StepData(0, 0, []))
    for microbatch in range(2):
        (sent,) = stage.input_grad(
            microbatch, ones(stage.forward(microbatch, Payload.of(torch.ones(2, 6, requires_grad=True)), split=True))
        )
        stage.weight_grad(microbatch)
        assert sent is not None
    assert set(gradients(layer)) == {"1.weight", "1.bias"}


@pytest.mark.usefixtures("every_product_deferred")
@pytest.mark.parametrize("split", [True, False])
def test_a_gradient_that_was_sent_back_is_the_takers_even_where_somebody_holds_the_graph(split: bool) -> None:
    layer, graphs = nn.Linear(6, 6), []
    layer.register_forward_hook(lambda _, given, output: graphs.append(output.grad_fn))
    stage = Stage({"layer": layer}, CPU)
    stage.begin(StepData(0, 0, []))
    for microbatch in range(2):
        output = stage.forward(microbatch, Payload.of(torch.ones(2, 6, requires_grad=True)), split=split)
        ((sent,),) = (stage.input_grad if split else stage.backward)(microbatch, ones(output))
        gone = weakref.ref(sent)
        del sent
        assert len(graphs) == microbatch + 1
        assert gone() is None


@pytest.mark.usefixtures("every_product_deferred")
def test_an_input_modified_after_its_product_is_an_error() -> None:
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            y = self.linear(x)
            x.add_(1)
            return y + x

    stage = Stage({"layer": Careless()}, CPU)
    stage.begin(StepData(0, 0, []))
    given = Payload.of(torch.ones(2, 6, requires_grad=True))
    stage.forward(0, given, split=True)
    stage.input_grad(1, ones(stage.forward(1, given, split=True)))
    with pytest.raises(ExecutionError, match="modified in place"):
        stage.weight_grad(1)


@pytest.mark.usefixtures("every_product_deferred")
def test_in_place_operations_on_a_products_output_are_fine() -> None:
    layer = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6, bias=False), nn.ReLU(inplace=True))
    results = {}
    for split in (True, False):
        layer.zero_grad()
        stage = Stage({"layer": layer}, CPU)
        stage.begin(StepData(0, 0, []))
        for microbatch in range(2):  # the input needs no gradient: the first product has no other node
            output = stage.forward(microbatch, Payload.of(torch.ones(2, 6)), split=split)
            (stage.input_grad if split else stage.backward)(microbatch, ones(output))
            if split:
                stage.weight_grad(microbatch)
        results[split] = gradients(layer)
    assert_equal_bits(results[True], results[False])


@pytest.mark.usefixtures("every_product_deferred")
def test_memory_of_i_is_freed_by_w() -> None:
    """Between I and W a stage holds inputs and output gradients of its products, and no graph."""
    stage = Stage({"layer": nn.Sequential(nn.Linear(6, 6), nn.Tanh())}, CPU)
    stage.begin(StepData(0, 0, []))
    for microbatch in range(2):
        stage.input_grad(
            microbatch, ones(stage.forward(microbatch, Payload.of(torch.ones(2, 6, requires_grad=True)), split=True))
        )
    assert len(stage._saved) == 2
    stage.weight_grad(0)
    stage.weight_grad(1)
    assert len(stage._saved) == 0
