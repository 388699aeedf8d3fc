"""What a pipeline over several processes can do, as jobs of the ranks that run on any devices.

Each job trains or evaluates, and returns the tensors and numbers of this rank that must have the same bits on simulated
devices and on the CPU.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from pipesched import Distributed, Numerics, Pipeline, schedules
from pipesched.errors import PipeschedError
from pipesched.planning.plan import Plan
from tests.simulated.features import CLASSES, ROWS, WIDTH, adam, batch, blocks, same, sgd

__all__ = ["FEATURES", "compared"]

_OPTIONS: dict[str, Any] = {"loss_fn": nn.CrossEntropyLoss(), "num_microbatches": 4, "seed": 1}
Feature = Callable[[Any, str], list[Any]]
#: A name -> the number of ranks, and the job.
FEATURES: dict[str, tuple[int, Feature]] = {}


def compared(group: Any, name: str) -> bool:
    """Run a feature on the CPU and on simulated devices. Return whether the bits of this rank are the same."""
    from tests.simulated.accelerator import start

    _, run = FEATURES[name]
    torch.manual_seed(0)
    expected = run(group, "cpu")
    start().judge.forget()
    torch.manual_seed(0)
    return same(expected, run(group, "sim"))


def feature(count: int) -> Callable[[Feature], Feature]:
    def add(function: Feature) -> Feature:
        FEATURES[function.__name__.replace("_", " ")] = count, function
        return function

    return add


class Run:
    """A pipeline with fixed boundaries: over all ranks of the group, or over two replicas if there are four ranks.

    Args:
        group: the ranks.
        kind: the type of their devices.
        schedule: the schedule.
        options: arguments of the Pipeline.

    """

    def __init__(self, group: Any, kind: str, schedule: str = "1f1b", **options: Any) -> None:
        self.group = group
        self.num_replicas, self.replica = 1, 0
        if group.size() == 4 and "mesh" not in options:
            self.num_replicas = 2
            mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("dp", "pp"))
            self.replica = mesh.get_local_rank("dp")
        else:
            mesh = options.pop("mesh", None) or DeviceMesh.from_group(group, kind)
        stages = schedules.get(schedule).program(2, 4).num_weights
        options = {"boundaries": [8 * stage // stages for stage in range(1, stages)], **_OPTIONS, **options}
        self.model = options.pop("model", None) or blocks()
        self.pipe = Pipeline(self.model, batch()[0][:2], mesh=mesh, schedule=schedule, **options)

    def part(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the rows of this replica."""
        rows = slice(self.replica * ROWS // self.num_replicas, (self.replica + 1) * ROWS // self.num_replicas)
        x, y = batch(step)
        return x[rows], y[rows]

    def train(self, steps: int = 3) -> list[float]:
        """Train, and return the losses."""
        return [float(self.step(step)) for step in range(steps)]

    def step(self, step: int) -> Tensor:
        x, y = self.part(step)
        return self.pipe.step(x, target=y)

    def state(self) -> list[Any]:
        """Return this rank's weights and gradients, on the host."""
        tensors = [tensor for one in self.pipe.parameters() for tensor in (one, one.grad)]
        return [None if tensor is None else tensor.detach().cpu() for tensor in tensors]


def trained(group: Any, kind: str, schedule: str = "1f1b", **options: Any) -> list[Any]:
    run = Run(group, kind, schedule, **options)
    with run.pipe:
        return [*run.train(), *run.state()]


# ---- two ranks ----


@feature(2)
def one_f_one_b(group: Any, kind: str) -> list[Any]:
    return trained(group, kind, optimizer=sgd)


@feature(2)
def zb_h1_with_checkpoints(group: Any, kind: str) -> list[Any]:
    return trained(group, kind, "zb-h1", optimizer=adam, checkpoint="except_last")


@feature(2)
def interleaved(group: Any, kind: str) -> list[Any]:
    return trained(group, kind, "interleaved-1f1b", optimizer=adam, checkpoint="always")


@feature(2)
def layers_offloaded(group: Any, kind: str) -> list[Any]:
    return trained(group, kind, "gpipe", optimizer=adam, checkpoint={str(layer): "offload" for layer in range(8)})


@feature(2)
def pipedream(group: Any, kind: str) -> list[Any]:
    run = Run(group, kind, "pipedream", optimizer=sgd)
    with run.pipe:
        losses = [run.step(step) for step in range(3)]
        run.pipe.flush()
        return [*map(float, losses), *run.state()]


@feature(2)
def optimizer_and_clipping_of_the_caller(group: Any, kind: str) -> list[Any]:
    """On a stream of the caller."""
    run = Run(group, kind)
    with own_stream(kind), run.pipe:
        optimizer = adam(run.pipe.parameters())
        norms = []
        for step in range(3):
            run.step(step)
            norms.append(float(run.pipe.clip_grad_norm_(0.1)))
            optimizer.step()
            optimizer.zero_grad()
        return [*norms, *run.state()]


@feature(2)
def numbers_watched(group: Any, kind: str) -> list[Any]:
    return trained(group, kind, optimizer=adam, numerics=Numerics(on_nonfinite="raise", clip_grad_norm=0.1))


@feature(2)
def batch_on_the_device(group: Any, kind: str) -> list[Any]:
    run = Run(group, kind, optimizer=sgd)
    with own_stream(kind), run.pipe:
        losses = []
        for step in range(3):
            x, y = (tensor.to(device_of(kind)) + 0 for tensor in run.part(step))
            losses.append(run.pipe.step(x, target=y))
        return [*map(float, losses), *run.state()]


@feature(2)
def batch_from_the_first_rank(group: Any, kind: str) -> list[Any]:
    run = Run(group, kind, optimizer=sgd, distributed=Distributed(inputs="first"))
    with run.pipe:
        losses = [float(run.step(step) if group.rank() == 0 else run.pipe.step()) for step in range(3)]
        return [*losses, *run.state()]


@feature(2)
def evaluated_and_gathered(group: Any, kind: str) -> list[Any]:
    run = Run(group, kind, optimizer=adam)
    with own_stream(kind), run.pipe:
        found: list[Any] = []
        for step in range(2):
            x, y = run.part(step)
            found.append(run.step(step))
            run.pipe.eval()
            with torch.no_grad():
                found += [run.pipe.evaluate(x, target=y), run.pipe(x, gather=True) * 1]
            run.pipe.train()
        found += run.pipe.full_state_dict().values()
        spans = run.pipe.gather_trace().spans
        return [*(one.detach().cpu() for one in found), len(spans), *run.state()]


class Passing(nn.Module):
    """Returns the output of its first layer beside its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        return self.last(hidden), hidden


def loss_of_first(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return functional.cross_entropy(output[0], target)


@feature(2)
def outputs_that_were_received(group: Any, kind: str) -> list[Any]:
    """The caller drops them while its stream reads them."""
    torch.manual_seed(1)
    model = Passing()
    run = Run(group, kind, model=model, boundaries=["last"], loss_fn=loss_of_first, optimizer=sgd)
    with own_stream(kind), run.pipe:
        sums = []
        for step in range(3):
            x, y = run.part(step)
            _, outputs = run.pipe.step(x, target=y, return_outputs=True)
            sums += [] if outputs is None else [outputs[1] * 2]
            del outputs
        return [*(one.detach().cpu() for one in sums), *run.state()]


@feature(2)
def outputs_gathered_on_streams_of_their_own(group: Any, kind: str) -> list[Any]:
    """The caller waits for none of its earlier streams, and drops each output at once."""
    torch.manual_seed(1)
    options = {"boundaries": ["last"], "loss_fn": loss_of_first, "num_microbatches": 1}
    run = Run(group, kind, model=Passing(), **options)
    run.pipe.eval()
    with run.pipe, torch.no_grad():
        for step in range(4):
            with own_stream(kind, joins=False):
                run.pipe(run.part(step)[0][:4], gather=True)
    return []


@feature(2)
def steps_on_streams_of_their_own(group: Any, kind: str) -> list[Any]:
    """The caller waits for none of its earlier streams."""
    run = Run(group, kind, optimizer=sgd)
    losses = []
    with run.pipe:
        for step in range(4):
            with own_stream(kind, joins=False):
                losses.append(run.step(step))
        torch.accelerator.synchronize(device_of("sim"))  # the current stream has not waited for the losses
        return [*map(float, losses)]


@feature(2)
def a_failed_step(group: Any, kind: str) -> list[Any]:
    """Stage 1 raises an error; then a new pipeline runs on the same devices."""
    run = Run(group, kind, optimizer=sgd)

    def hook(*_: Any) -> None:
        raise ValueError("this layer fails")

    with run.pipe:
        run.step(0)
        for layer in [run.model[6]] if group.rank() else []:
            layer.register_forward_pre_hook(hook)
        try:
            run.step(1)
        except (ValueError, PipeschedError) as error:
            said = "this layer fails" in str(error)
        with torch.no_grad():
            for parameter in run.pipe.parameters():
                parameter.mul_(0.5)
    return [said, *trained(group, kind, optimizer=sgd)]


# ---- changes of the plan ----


def plan_of(schedule: str, num_ranks: int, num_microbatches: int = 4) -> Plan:
    """Return the plan of a pipeline on CPUs."""
    stages = schedules.get(schedule).program(num_ranks, num_microbatches).num_weights
    cut = [8 * stage // stages for stage in range(1, stages)]
    options = {**_OPTIONS, "num_microbatches": num_microbatches, "boundaries": cut, "schedule": schedule}
    with Pipeline(blocks(), batch()[0][:2], devices=["cpu"] * num_ranks, **options) as pipe:
        return pipe.plan


#: The number of replicas, and the plan of each, before each later step.
_CHANGES_OF_TWO = [(1, ("1f1b", 1)), (1, ("zb-h1", 2)), (1, ("interleaved-1f1b", 2)), (1, ("gpipe", 1))]
_CHANGES_OF_FOUR = [(2, ("1f1b", 1)), (2, ("zb-v", 2)), (1, ("1f1b", 3, 8)), (2, ("zb-h1", 2))]


def replanned(run: Run, own: torch.optim.Optimizer | None = None) -> list[Any]:
    """Train while the plan changes. With an optimizer of the caller, gradients move, too."""
    found: list[Any] = []
    states = {} if own is None else {"optimizer": own}
    changes = _CHANGES_OF_TWO if run.num_replicas == 1 else _CHANGES_OF_FOUR
    for step, change in enumerate([None, *changes]):
        if change is not None:
            run.num_replicas, plan = change
            run.pipe.replan(plan_of(*plan), num_replicas=run.num_replicas, **states)
            run.replica = torch.distributed.get_rank(run.group) * run.num_replicas // run.group.size()
        if own is not None and step:
            own.step()
            own.zero_grad()
        found.append(run.step(step))
    return [*map(float, found), *run.state()]


@feature(2)
def replanned_with_the_optimizer_of_the_caller(group: Any, kind: str) -> list[Any]:
    run = Run(group, kind)
    with own_stream(kind), run.pipe:
        return replanned(run, adam(run.pipe.parameters()))


@feature(2)
def replanned_with_optimizers_of_the_pipeline(group: Any, kind: str) -> list[Any]:
    """Layers that leave go back to the meta device."""
    with torch.device("meta"):
        model = blocks()
    run = Run(group, kind, model=model, optimizer=adam)
    with own_stream(kind), run.pipe:
        return replanned(run)


@feature(2)
def replanned_with_steps_counted_on_the_device(group: Any, kind: str) -> list[Any]:
    run = Run(group, kind)
    with own_stream(kind), run.pipe:
        return replanned(run, torch.optim.AdamW(run.pipe.parameters(), 0.01, fused=True))


# ---- two replicas of two ranks ----


def divided(zero: int, group: Any, kind: str) -> list[Any]:
    numerics = Numerics(clip_grad_norm=0.1)
    return trained(group, kind, optimizer=adam, numerics=numerics, distributed=Distributed(zero=zero))


for _zero in range(4):
    FEATURES[f"replicas with zero {_zero}"] = 4, partial(divided, _zero)


def divided_and_replanned(zero: int, group: Any, kind: str) -> list[Any]:
    run = Run(group, kind, optimizer=adam, distributed=Distributed(zero=zero))
    with own_stream(kind), run.pipe:
        return replanned(run)


for _zero in (0, 2, 3):
    FEATURES[f"replanned with zero {_zero}"] = 4, partial(divided_and_replanned, _zero)


@feature(4)
def replicas_replanned_with_the_optimizer_of_the_caller(group: Any, kind: str) -> list[Any]:
    run = Run(group, kind)
    with own_stream(kind), run.pipe:
        return replanned(run, adam(run.pipe.parameters()))


@feature(4)
def weights_of_replicas_read_after_a_step(group: Any, kind: str) -> list[Any]:
    run = Run(group, kind, optimizer=adam, distributed=Distributed(zero=1))
    with run.pipe:
        return [*run.train(1), *run.state()]


@feature(4)
def replicas_with_the_optimizer_of_the_caller(group: Any, kind: str) -> list[Any]:
    """Gradients accumulate, and the caller changes weights and gradients on a stream of its own."""
    run = Run(group, kind, "zb-h1")
    with own_stream(kind), run.pipe:
        losses = []
        for step in range(3):
            losses.append(run.step(step))
            with torch.no_grad():
                for parameter in run.pipe.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
                    parameter.grad.mul_(0.5)
        return [*map(float, losses), *run.state()]


@feature(4)
def replicas_with_weights_gathered_often(group: Any, kind: str) -> list[Any]:
    distributed = Distributed(zero=3, gather_once=False, inputs="first")
    run = Run(group, kind, "interleaved-1f1b", optimizer=adam, checkpoint="always", distributed=distributed)
    run.num_replicas, run.replica = 1, 0  # rank 0 passes the rows of all
    with run.pipe:
        losses = [float(run.step(step) if group.rank() == 0 else run.pipe.step()) for step in range(3)]
        return [*losses, *run.state()]


@feature(4)
def replicas_with_a_scaler(group: Any, kind: str) -> list[Any]:
    scaler = torch.amp.GradScaler(kind, init_scale=2.0**40, growth_interval=1)
    numerics = Numerics(scaler=scaler, reduction_order="tree")
    return trained(group, kind, "zb-h1", optimizer=sgd, numerics=numerics)


@feature(4)
def replicas_saved_and_loaded(group: Any, kind: str) -> list[Any]:
    options = {"optimizer": adam, "distributed": Distributed(zero=3)}
    run = Run(group, kind, **options)
    folder = [tempfile.mkdtemp() if group.rank() == 0 else ""]
    torch.distributed.broadcast_object_list(folder, 0, group=group, device=torch.device("cpu"))
    with run.pipe:
        run.step(0)
        run.pipe.save(folder[0], asynchronous=True)
        found = [float(run.step(1)), *(one.detach().cpu() for one in run.pipe.full_state_dict().values())]
    run = Run(group, kind, **options)
    with run.pipe:
        run.pipe.load(folder[0])
        return [*found, float(run.step(1)), *run.state()]


# ---- two stages over tensor groups of two ranks ----


class SplitBlock(nn.Module):
    """Two linear layers that ranks divide, with a dropout between them, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(functional.gelu(self.up(self.norm(x)))))


def split(group: Any, kind: str, schedule: str = "1f1b", **options: Any) -> list[Any]:
    torch.manual_seed(1)
    model = nn.Sequential(*(SplitBlock() for _ in range(8)), nn.Linear(WIDTH, CLASSES))
    mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("pp", "tp"))
    distributed = Distributed(tensor_parallel={"*.up": "column", "*.down": "row", "8": "column-gathered"})
    return trained(group, kind, schedule, model=model, mesh=mesh, distributed=distributed, **options)


@feature(4)
def layers_split(group: Any, kind: str) -> list[Any]:
    return split(group, kind, optimizer=adam, numerics=Numerics(clip_grad_norm=0.1))


@feature(4)
def layers_split_with_weight_gradients_apart(group: Any, kind: str) -> list[Any]:
    return split(group, kind, "zb-h1", optimizer=sgd)


@feature(4)
def layers_split_and_recomputed(group: Any, kind: str) -> list[Any]:
    return split(group, kind, "interleaved-1f1b", optimizer=sgd, checkpoint="always")


@feature(4)
def stages_sharded_by_fsdp(group: Any, kind: str) -> list[Any]:
    mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("fsdp", "pp"))

    def wrap(module: nn.Module, stage: int) -> nn.Module:
        return fully_shard(module, mesh=mesh["fsdp"])

    run = Run(group, kind, optimizer=sgd, mesh=mesh["pp"], wrap=wrap)
    with run.pipe:
        losses = run.train()
        return [*losses, *(one.detach().to_local().cpu() for one in run.pipe.parameters())]


def device_of(kind: str) -> str:
    return "cpu" if kind == "cpu" else f"{kind}:{torch.accelerator.current_device_index()}"


@contextmanager
def own_stream(kind: str, *, joins: bool = True) -> Iterator[None]:
    """The caller's own stream on the device of this rank. If it joins, the stream before waits for it."""
    if kind == "cpu":
        yield
        return
    stream = torch.Stream(device=device_of(kind))
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        yield
    if joins:
        torch.accelerator.current_stream().wait_stream(stream)
