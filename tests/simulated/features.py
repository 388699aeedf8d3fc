"""What a pipeline can do, as functions that run on any devices: on CPUs, and on simulated accelerators.

Each function trains or evaluates, and returns the tensors and numbers that must have the same bits on all devices. All
fix the boundaries, because a cut by measured times would differ.
"""

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Numerics, Pipeline, add_loss, profile, schedules, tune

__all__ = ["FEATURES", "outcome", "same"]

Optimizer = torch.optim.Optimizer
WIDTH, CLASSES, ROWS = 16, 4, 16
OFFLOADED = {str(layer): "offload" for layer in range(8)}


@dataclass(frozen=True)
class Devices:
    """The devices of a run: of the ranks, of the batch, and one without a rank."""

    kind: str

    def ranks(self, count: int = 2) -> list[str]:
        return [self.at(index) for index in range(count)]

    def at(self, index: int) -> str:
        return "cpu" if self.kind == "cpu" else f"{self.kind}:{index}"

    @contextmanager
    def own_stream(self, index: int = 0) -> Iterator[None]:
        """The caller's own stream on a device."""
        if self.kind == "cpu":
            yield
            return
        stream = torch.Stream(device=self.at(index))
        stream.wait_stream(torch.accelerator.current_stream(self.at(index)))
        with stream:
            yield

    def pinned(self, tensor: Tensor) -> Tensor:
        return tensor if self.kind == "cpu" else tensor.pin_memory()


Feature = Callable[[Devices], Any]
FEATURES: dict[str, Feature] = {}


def feature(function: Feature) -> Feature:
    FEATURES[function.__name__.replace("_", " ")] = function
    return function


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.LayerNorm(2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(functional.gelu(self.norm(self.up(x)))))


class Skips(nn.Module):
    """A skip connection over all stages, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.last.weight = self.first.weight
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x) + first)


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.RNNBase]) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.cells = cell(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.cells(self.before(x))[0])


def blocks() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Block() for _ in range(8)), nn.Linear(WIDTH, CLASSES))


def skips() -> Skips:
    torch.manual_seed(1)
    return Skips()


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=made), torch.randint(0, CLASSES, (ROWS,), generator=made)


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, 0.02, momentum=0.9, foreach=False)


def adam(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, 0.01, foreach=False)


def pipeline(model: nn.Module, devices: Sequence[str], schedule: str = "1f1b", **options: Any) -> Pipeline:
    stages = schedules.get(schedule).program(len(devices), 8).num_weights
    layers = len(list(model.children())) if isinstance(model, nn.Sequential) else 8
    options.setdefault("boundaries", [layers * stage // stages for stage in range(1, stages)])
    options.setdefault("loss_fn", nn.CrossEntropyLoss())
    options.setdefault("num_microbatches", 8)
    return Pipeline(model, batch()[0][:2], devices=devices, schedule=schedule, seed=1, **options)


def state(model: nn.Module) -> list[Tensor | None]:
    """The weights, buffers and gradients of a model, on the host."""
    tensors = [*model.parameters(), *model.buffers(), *(parameter.grad for parameter in model.parameters())]
    return [None if tensor is None else tensor.detach().cpu() for tensor in tensors]


def trained(
    devices: Devices,
    schedule: str = "1f1b",
    *,
    model: Callable[[], nn.Module] = blocks,
    ranks: int = 2,
    own: Callable[[Any], Optimizer] | None = None,
    x_on: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    **options: Any,
) -> Any:
    """Train three steps. ``own`` makes the caller's optimizer; ``x_on`` brings inputs and targets to their device."""
    made = model()
    with pipeline(made, devices.ranks(ranks), schedule, **options) as pipe:
        optimizer = None if own is None else own(pipe.parameters())
        losses = []
        for step in range(3):
            x, y = map(x_on, batch(step))
            losses.append(pipe.step(x, target=y))
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        pipe.flush()
        return [*map(float, losses), *state(made)]


# ---- schedules ----


def of_schedule(name: str, devices: Devices) -> Any:
    program = schedules.get(name).program(2, 8)
    shares_weights = program.num_weights < program.num_stages  # then the caller updates
    with devices.own_stream():
        return trained(devices, name, own=adam) if shares_weights else trained(devices, name, optimizer=sgd)


for _name in schedules.names():
    FEATURES[f"schedule {_name}"] = partial(of_schedule, _name)


# ---- streams and places of the batch ----


@feature
def own_optimizer_on_own_stream(devices: Devices) -> Any:
    with devices.own_stream():
        return trained(devices, own=adam)


@feature
def batch_on_the_first_device(devices: Devices) -> Any:
    with devices.own_stream():
        return trained(devices, optimizer=sgd, x_on=lambda tensor: tensor.to(devices.at(0)) + 0)


@feature
def batch_on_the_last_device(devices: Devices) -> Any:
    return trained(devices, "zb-h1", optimizer=sgd, x_on=lambda tensor: tensor.to(devices.at(1)) + 0)


@feature
def batch_on_a_device_without_a_rank(devices: Devices) -> Any:
    with devices.own_stream(3):
        return trained(devices, optimizer=sgd, x_on=lambda tensor: tensor.to(devices.at(3)) + 0)


@feature
def batch_in_pinned_memory_that_is_refilled(devices: Devices) -> Any:
    x, y = map(devices.pinned, batch())

    def refilled(tensor: Tensor) -> Tensor:
        return (x if tensor.is_floating_point() else y).copy_(tensor)

    return trained(devices, optimizer=sgd, x_on=refilled)


def asynchronous(ranks: int, num_microbatches: int, lag: int, devices: Devices) -> Any:
    """The caller makes a batch when the ranks have launched the last backward of an earlier batch."""
    model = blocks()
    num_steps = 6
    launched = [threading.Event() for _ in range(num_steps)]
    calls = iter(range(num_steps * num_microbatches))

    def count(*_: Any) -> None:
        step, microbatch = divmod(next(calls), num_microbatches)
        if microbatch == num_microbatches - 1:
            launched[step].set()

    model[0].register_full_backward_hook(count)
    options = {"optimizer": sgd, "num_microbatches": num_microbatches}
    with pipeline(model, devices.ranks(ranks), "pipedream", **options) as pipe:
        losses = []
        for step in range(num_steps):
            if step >= lag:
                assert launched[step - lag].wait(60)
            x, y = (tensor.to(devices.at(0)) + 0 for tensor in batch(step))
            losses.append(pipe.step(x, target=y))
            del x, y
        pipe.flush()
        return [*map(float, losses), *state(model)]


FEATURES["asynchronous batch on the first device"] = partial(asynchronous, 2, 8, 2)
FEATURES["asynchronous steps that are shorter than the pipeline"] = partial(asynchronous, 4, 2, 3)


@feature
def asynchronous_batch_on_a_device_without_a_rank(devices: Devices) -> Any:
    with devices.own_stream(3):
        return trained(devices, "pipedream-2bw", optimizer=sgd, x_on=lambda tensor: tensor.to(devices.at(3)) + 0)


@feature
def pinned_memory_of_an_asynchronous_schedule(devices: Devices) -> Any:
    """Each memory is refilled once the following step has returned."""
    memories = [tuple(map(devices.pinned, batch())) for _ in range(2)]
    given = Tensor.clone if devices.kind == "cpu" else Tensor.detach  # a CPU's backwards still read the batch
    model = blocks()
    with pipeline(model, devices.ranks(), "pipedream", optimizer=sgd) as pipe:
        losses = []
        for step in range(5):
            x, y = memories[step % 2]
            for memory, values in zip((x, y), batch(step), strict=True):
                memory.copy_(values)
            losses.append(pipe.step(given(x), target=given(y)))
        pipe.flush()
        return [*map(float, losses), *state(model)]


@feature
def two_ranks_on_one_device(devices: Devices) -> Any:
    model = blocks()
    with devices.own_stream(), pipeline(model, [devices.at(0)] * 2, "zb-v", optimizer=adam) as pipe:
        losses = [float(pipe.step(batch(step)[0], target=batch(step)[1])) for step in range(3)]
        return [*losses, *state(model)]


@feature
def cpu_beside_devices(devices: Devices) -> Any:
    model = blocks()
    with pipeline(model, [devices.at(0), "cpu", devices.at(1)], optimizer=adam) as pipe:
        losses = [float(pipe.step(batch(step)[0], target=batch(step)[1])) for step in range(3)]
        return [*losses, *state(model)]


@feature
def several_pipelines_take_turns(devices: Devices) -> Any:
    models = blocks(), blocks()
    with pipeline(models[0], devices.ranks(), optimizer=sgd) as one, pipeline(models[1], devices.ranks()) as other:
        x, y = batch()
        losses = [pipe.step(x, target=y) for _ in range(2) for pipe in (one, other)]
        return [*map(float, losses), *state(models[0]), *state(models[1])]


class KeepsInput(nn.Module):
    """Returns its input beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = blocks()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.layers(x)


@feature
def outputs_that_are_inputs(devices: Devices) -> Any:
    """The caller computes with them on its own streams, and drops them."""
    options = {"boundaries": ["layers.4"], "schedule": "gpipe", "num_microbatches": 1, "seed": 1}
    with devices.own_stream(), devices.own_stream(1):
        with Pipeline(KeepsInput().eval(), batch()[0], devices=devices.ranks(), **options) as pipe, torch.no_grad():
            found = []
            for step in range(3):
                same_values, output = pipe(batch(step)[0])
                found += [(same_values * 2).sum(), output.sum()]
                del same_values, output
        return [float(value) for value in found]


class HostSums(nn.Module):
    """Returns its output, and a sum that it brings to the host without waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y.detach().sum(0).to("cpu", non_blocking=True), y


class AddsSums(nn.Module):
    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return both[0] + both[1]


@feature
def host_values_of_a_device_rank(devices: Devices) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(HostSums(), AddsSums(), nn.Linear(WIDTH, CLASSES))
    with pipeline(model, devices.ranks(), optimizer=sgd, boundaries=[1]) as pipe:
        return [*(float(pipe.step(batch(step)[0], target=batch(step)[1])) for step in range(2)), *state(model)]


@feature
def host_values_that_a_cpu_rank_takes(devices: Devices) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(HostSums(), AddsSums(), nn.Linear(WIDTH, CLASSES))
    with pipeline(model, [devices.at(0), "cpu"], optimizer=sgd, boundaries=[1]) as pipe:
        return [*(float(pipe.step(batch(step)[0], target=batch(step)[1])) for step in range(2)), *state(model)]


class Penalised(Block):
    """Adds the mean square of its output to the loss."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        add_loss(y.square().mean(), name="square")
        return y


@feature
def added_losses_and_metrics(devices: Devices) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(*(Penalised() for _ in range(8)), nn.Linear(WIDTH, CLASSES))

    def metrics(output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"accuracy": (output.argmax(-1) == target).float().mean(), "norm": output.norm()}

    found = []
    with devices.own_stream(), devices.own_stream(1):
        for schedule in ("1f1b", "pipedream"):
            with pipeline(model, devices.ranks(), schedule, optimizer=sgd) as pipe:
                for step in range(3):
                    found.append(pipe.step(batch(step)[0], target=batch(step)[1], metrics=metrics))
                    found += pipe.metrics.values()
                pipe.flush()
        return [*map(float, found), *state(model)]


# ---- losses and labels ----


def ignoring(rows: Sequence[int], tensor: Tensor, devices: Devices) -> Tensor:
    if not tensor.is_floating_point():
        tensor = tensor.index_fill(0, torch.tensor(rows), -100)
    return tensor.to(devices.at(1)) + 0


def users_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.float(), target)


@feature
def labels_that_are_ignored(devices: Devices) -> Any:
    """Micro-batch 0 has no label that counts, micro-batch 2 has one."""
    return trained(devices, optimizer=sgd, x_on=partial(ignoring, [0, 1, 5], devices=devices))


@feature
def labels_that_a_users_loss_ignores(devices: Devices) -> Any:
    return trained(devices, optimizer=sgd, loss_fn=users_loss, x_on=partial(ignoring, [0, 1, 5], devices=devices))


@feature
def class_weights(devices: Devices) -> Any:
    weight = torch.tensor([0.5, 1.0, 0.0, 2.0])
    loss_fn = nn.CrossEntropyLoss(weight=weight)
    return trained(devices, optimizer=sgd, loss_fn=loss_fn, x_on=lambda tensor: tensor.to(devices.at(1)) + 0)


@feature
def squared_errors(devices: Devices) -> Any:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, functional.one_hot(target, CLASSES).to(output.dtype))

    return trained(devices, "zb-h1", optimizer=sgd, loss_fn=loss)


@feature
def labels_on_a_device_with_updates_in_flight(devices: Devices) -> Any:
    return trained(devices, "pipedream", optimizer=sgd, x_on=partial(ignoring, [0, 1, 5], devices=devices))


# ---- memory ----


@feature
def checkpoint_always(devices: Devices) -> Any:
    return trained(devices, "interleaved-1f1b", optimizer=adam, checkpoint="always")


@feature
def checkpoint_except_last(devices: Devices) -> Any:
    return trained(devices, "zb-h1", optimizer=adam, checkpoint="except_last")


@feature
def layers_recomputed(devices: Devices) -> Any:
    options = {str(layer): ("recompute", "recompute-cheap")[layer % 2] for layer in range(8)}
    return trained(devices, optimizer=adam, checkpoint=options)


@feature
def layers_offloaded(devices: Devices) -> Any:
    with devices.own_stream():
        return trained(devices, "gpipe", optimizer=adam, checkpoint=OFFLOADED)


@feature
def layers_offloaded_on_one_device(devices: Devices) -> Any:
    return trained(devices, "zb-h1", ranks=1, optimizer=adam, checkpoint=OFFLOADED)


# ---- models ----


@feature
def skip_connections_and_ties(devices: Devices) -> Any:
    with devices.own_stream():
        return trained(devices, model=skips, own=adam, boundaries=["blocks.2"])


@feature
def ties_over_three_devices(devices: Devices) -> Any:
    return trained(devices, "zb-h1", model=skips, ranks=3, optimizer=adam, boundaries=["blocks.1", "blocks.3"])


def recurrent(cell: type[nn.RNNBase], devices: Devices) -> Any:
    torch.manual_seed(1)
    model = Recurrent(cell)
    x = torch.randn(ROWS, 5, WIDTH, generator=torch.Generator().manual_seed(0))
    options = {"devices": devices.ranks(), "boundaries": ["after"], "schedule": "1f1b", "num_microbatches": 8}
    with Pipeline(model, x[:2], loss_fn=nn.MSELoss(), seed=1, **options) as pipe:
        return [float(pipe.step(x, target=x[..., :CLASSES])), *state(model)]


@feature
def gru(devices: Devices) -> Any:
    return recurrent(nn.GRU, devices)


@feature
def lstm(devices: Devices) -> Any:
    return recurrent(nn.LSTM, devices)


def normed() -> nn.Sequential:
    torch.manual_seed(1)
    parts = [part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))]
    return nn.Sequential(*parts, nn.Linear(WIDTH, CLASSES))


@feature
def batch_norm_of_the_mini_batch(devices: Devices) -> Any:
    numerics = Numerics(batch_norm="mini-batch")
    return trained(devices, model=normed, optimizer=sgd, numerics=numerics, num_microbatches=4)


@feature
def batch_norm_of_micro_batches(devices: Devices) -> Any:
    return trained(devices, "zb-h1", model=normed, optimizer=sgd, num_microbatches=4, checkpoint="always")


@feature
def bfloat16(devices: Devices) -> Any:
    def low(tensor: Tensor) -> Tensor:
        return tensor.bfloat16() if tensor.is_floating_point() else tensor.to(devices.at(0)) + 0

    model = blocks().bfloat16()
    options = {"boundaries": [4], "schedule": "zb-h1", "num_microbatches": 8, "optimizer": adam, "seed": 1}
    with Pipeline(
        model, low(batch()[0])[:2], loss_fn=nn.CrossEntropyLoss(), devices=devices.ranks(), **options
    ) as pipe:
        losses = [float(pipe.step(low(batch(step)[0]), target=low(batch(step)[1]))) for step in range(3)]
        return [*losses, *state(model)]


# ---- gradients and numbers ----


@feature
def clipping_by_the_caller(devices: Devices) -> Any:
    model = blocks()
    with devices.own_stream(), pipeline(model, devices.ranks()) as pipe:
        optimizer = adam(pipe.parameters())
        norms = []
        for step in range(3):
            pipe.step(batch(step)[0], target=batch(step)[1])
            norms.append(float(pipe.clip_grad_norm_(0.1)))
            optimizer.step()
            optimizer.zero_grad()
        return [*norms, *state(model)]


@feature
def clipping_in_the_step(devices: Devices) -> Any:
    return trained(devices, "zb-v", optimizer=adam, numerics=Numerics(clip_grad_norm=0.1))


def watched(on_nonfinite: str, devices: Devices) -> Any:
    model = blocks()
    numerics = Numerics(on_nonfinite=on_nonfinite, clip_grad_norm=1.0)
    with pipeline(model, devices.ranks(), optimizer=adam, numerics=numerics) as pipe:
        losses = [float(pipe.step(batch(step)[0], target=batch(step)[1])) for step in range(3)]
        return [*losses, *state(model)]


FEATURES["numbers watched, raise"] = partial(watched, "raise")
FEATURES["numbers watched, skip"] = partial(watched, "skip")


@feature
def gradient_scaler(devices: Devices) -> Any:
    scaler = torch.amp.GradScaler(devices.kind, init_scale=2.0**40, growth_interval=1)
    return trained(devices, optimizer=sgd, numerics=Numerics(scaler=scaler))


@feature
def sums_in_a_tree(devices: Devices) -> Any:
    return trained(devices, "1f1b", optimizer=sgd, numerics=Numerics(reduction_order="tree"))


# ---- other calls ----


@feature
def evaluate_and_forward(devices: Devices) -> Any:
    model = blocks()
    with devices.own_stream(), pipeline(model, devices.ranks(), optimizer=adam) as pipe:
        found = []
        for step in range(2):
            x, y = (tensor.to(devices.at(0)) + 0 for tensor in batch(step))
            found.append(pipe.step(x, target=y))
            pipe.eval()
            with torch.no_grad():
                found += [pipe.evaluate(x, target=y), pipe(x) * 1]
            pipe.train()
        return [*(value.cpu() for value in found), *state(model)]


@feature
def gradients_of_outputs_and_inputs(devices: Devices) -> Any:
    model = blocks()
    with devices.own_stream(), pipeline(model, devices.ranks(), loss_fn=None) as pipe:
        x, y = (tensor.to(devices.at(0)) + 0 for tensor in batch())
        x.requires_grad_()
        output = pipe(x)
        loss = functional.cross_entropy(output, y.to(output.device))
        loss.backward()
        return [float(loss), x.grad.cpu(), *state(model)]


@feature
def saved_and_loaded(devices: Devices) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model = blocks()
        with devices.own_stream(), pipeline(model, devices.ranks(), optimizer=adam) as pipe:
            pipe.step(batch(0)[0], target=batch(0)[1])
            pipe.save(folder)
        model = blocks()
        with pipeline(model, devices.ranks(3), optimizer=adam) as pipe:
            pipe.load(folder)
            return [float(pipe.step(batch(1)[0], target=batch(1)[1])), *state(model)]


@feature
def saved_while_training(devices: Devices) -> Any:
    found = []
    for _ in range(1):
        with tempfile.TemporaryDirectory() as folder:
            model = blocks()
            with devices.own_stream(), pipeline(model, devices.ranks(), optimizer=adam) as pipe:
                for step in range(3):
                    pipe.step(batch(step)[0], target=batch(step)[1])
                    pipe.save(f"{folder}/{step}", asynchronous=True)
                found += state(model)
            model = blocks()
            with pipeline(model, devices.ranks(), optimizer=adam) as pipe:
                pipe.load(f"{folder}/1")
                found += [float(pipe.step(batch(2)[0], target=batch(2)[1])), *state(model)]
    return found


@feature
def replanned(devices: Devices) -> Any:
    return under_changes(devices, optimizer=adam)


@feature
def replanned_with_own_optimizer(devices: Devices) -> Any:
    """On a stream of the caller; gradients move with their parameters."""
    with devices.own_stream():
        return under_changes(devices, own=adam)


def under_changes(devices: Devices, *, own: Callable[[Any], Optimizer] | None = None, **options: Any) -> Any:
    model = blocks()
    with pipeline(model, devices.ranks(3), **options) as pipe:
        optimizer = None if own is None else own(pipe.parameters())
        plans = [pipe.plan]
        for ranks, schedule in ((2, "1f1b"), (1, "gpipe")):
            with pipeline(blocks(), devices.ranks(ranks), schedule, **options) as other:
                plans.append(other.plan)
        losses = []
        for step, plan in enumerate((None, plans[1], plans[0], plans[2])):
            if plan is not None:
                pipe.replan(plan, optimizer=optimizer)
            if optimizer is not None and step:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(pipe.step(batch(step)[0], target=batch(step)[1]))
        return [*map(float, losses), *state(model)]


@feature
def a_failed_step_and_another(devices: Devices) -> Any:
    """After the failure the caller changes the weights, which ranks may still be reading."""
    model = blocks()
    fails = [False]

    def hook(*_: Any) -> None:
        if fails[0]:
            raise ValueError("this layer fails")

    with devices.own_stream(), pipeline(model, devices.ranks(), optimizer=sgd) as pipe:
        model[6].register_forward_pre_hook(hook)
        x, y = batch()
        for fails[0] in (False, True):
            try:
                pipe.step(x, target=y)
            except ValueError:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.5)
        fails[0] = False
        return [float(pipe.step(x, target=y)), *state(model)]


@feature
def a_failed_step_that_offloads(devices: Devices) -> Any:
    model = blocks()
    fails = [False]

    def hook(*_: Any) -> None:
        if fails[0]:
            raise ValueError("this layer fails")

    with devices.own_stream(), pipeline(model, devices.ranks(), "gpipe", optimizer=sgd, checkpoint=OFFLOADED) as pipe:
        model[7].register_full_backward_pre_hook(hook)
        x, y = batch()
        losses = []
        for fails[0] in (False, True, False):
            try:
                losses.append(float(pipe.step(x, target=y)))
            except ValueError:
                losses.append(0.0)
        return [*losses, *state(model)]


@feature
def checked(devices: Devices) -> Any:
    model = blocks()
    with pipeline(model, devices.ranks()) as pipe:
        x, y = batch()
        report = pipe.check(x, target=y)
        return [bool(report), *state(model)]


@feature
def compiled_by_dynamo(devices: Devices) -> Any:
    """With a backend that runs the captured operators as they are: inductor knows no simulated device."""
    return trained(devices, optimizer=sgd, compile={"backend": "eager"})


@feature
def profiled_on_own_stream(devices: Devices) -> Any:
    """The weights change on the caller's stream just before they are measured, and just afterwards."""
    model = blocks()
    with devices.own_stream():
        model.to(devices.at(0))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        profile(model, batch()[0][:2].to(devices.at(0)), device=devices.at(0), rows=[2], thorough=False)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
        return state(model)


@feature
def tuned_and_trained(devices: Devices) -> Any:
    """The plan may differ between devices; the weights after tuning do not."""
    model = blocks()
    x, y = batch()
    options = {"devices": devices.ranks(), "batch_size": ROWS, "loss_fn": nn.CrossEntropyLoss(), "target": y[:2]}
    with devices.own_stream():
        plan = tune(model, x[:2], confirm=1, all_ranks=True, optimizer=sgd, **options)
        with Pipeline(model, x[:2], loss_fn=options["loss_fn"], devices=devices.ranks(), plan=plan, seed=1) as pipe:
            pipe.evaluate(x, target=y)
    return state(model)


def outcome(name: str, kind: str) -> list[Any]:
    """Run a feature on devices of a kind, and return its results."""
    around = nullcontext() if kind == "cpu" else torch.accelerator.device_index(0)
    with around:
        return FEATURES[name](Devices(kind))


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether all results have the same bits."""
    return len(one) == len(other) and all(
        torch.equal(mine, theirs) if isinstance(mine, Tensor) else mine == theirs
        for mine, theirs in zip(one, other, strict=True)
    )
