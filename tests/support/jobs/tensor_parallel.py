"""Jobs of the tests of tensor parallelism: they train split layers, and compare with whole layers in a plain loop."""

import warnings
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from pipesched import Distributed, Link, Links, Numerics, Pipeline, Search, schedules
from pipesched.parallel import Block as EncoderBlock
from pipesched.parallel import Column, Row
from pipesched.program.actions import Kind
from pipesched.testing import clip_grad_norm_, reference_step
from tests.support import rank_processes
from tests.support.places import even_boundaries

SEED, ROWS, LENGTH, STEPS, WIDTH = 3, 32, 16, 3, 96  # so large that the W of a linear layer pays
ASYNCHRONOUS = ("pipedream", "pipedream-2bw")  # their results depend on the cut
SPLIT = {"*.up": "column", "*.down": "row"}


class Block(nn.Module):
    """Two linear layers with a dropout between them, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.inner, self.outer = nn.Dropout(0.2), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.down(self.inner(functional.gelu(self.up(self.norm(x))))))


class Sums(Block):
    """Joins the columns of all ranks but the first between its linear layers."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.down(self.inner(self.up(self.norm(x)).cumsum(-1))))


class Case(NamedTuple):
    """The options of a training run, on a mesh of (dp, pp, tp) ranks."""

    mesh: tuple[int, int, int] = (1, 2, 2)
    schedule: str = "1f1b"
    dtype: torch.dtype = torch.float32
    inputs: str = "all"
    zero: int = 0
    clip: float | None = 0.5

    @property
    def num_microbatches(self) -> int:
        return 8 // self.mesh[0]


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return rank_processes.mesh_of(shape, ("dp", "pp", "tp"))


def model_of(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4))).to(dtype)


def batch_of(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(ROWS, LENGTH, WIDTH, generator=generator).to(dtype) for _ in range(2))
    return x, y


def boundaries_of(case: Case, num_layers: int = 4) -> list[int]:
    return even_boundaries(num_layers, case.mesh[1] * schedules.get(case.schedule).chunks_per_rank)


def sgd(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def pipeline(case: Case, **options: Any) -> Pipeline:
    mesh = options.pop("mesh") if "mesh" in options else mesh_of(case.mesh)
    model = options.pop("model", None) or model_of(case.dtype)
    x, _ = batch_of(case.dtype)
    given = {"timeout": 20, "inputs": case.inputs, "zero": case.zero, "tensor_parallel": SPLIT}
    named: dict[str, Any] = {
        "loss_fn": functional.mse_loss,
        "schedule": case.schedule,
        "boundaries": None if "plan" in options else boundaries_of(case, len(model)),  # so that no layer is measured
        "num_microbatches": case.num_microbatches,
        "seed": SEED,
        "optimizer": sgd,
        "numerics": Numerics(clip_grad_norm=case.clip),
        "distributed": Distributed(**given | options.pop("distributed", {})),
    }
    with warnings.catch_warnings(action="ignore"):
        return Pipeline(model, x[:4], mesh=mesh, **named | options)


def step(pipe: Pipeline, case: Case, **wanted: Any) -> Any:
    """Run a step of this rank's replica."""
    x, y = batch_of(case.dtype)
    if case.inputs == "first":
        return pipe.step(**wanted) if distributed.get_rank() else pipe.step(x, target=y, **wanted)
    replica, replicas = distributed.get_rank() // (case.mesh[1] * case.mesh[2]), case.mesh[0]
    own = slice(ROWS * replica // replicas, ROWS * (replica + 1) // replicas)
    return pipe.step(x[own], target=y[own], **wanted)


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float | None]
    #: This rank's blocks of the weights of its stages, or with zero=3 the whole weights, by their names.
    weights: dict[str, Tensor]
    #: W / (I + W), of the median times of this rank's actions; 0 if there is no W.
    share: float


def trained(group: Any, case: Case) -> Trained:
    with pipeline(case) as pipe:
        losses, norms = [], []
        for _ in range(STEPS):
            losses.append(float(step(pipe, case)))
            norms.append(None if pipe.grad_norm is None else float(pipe.grad_norm))
        inputs_s, weights_s = (_median_s(pipe.trace, kind) for kind in (Kind.I, Kind.W))
        if case.zero == 3:
            pipe.gather_model()
        weights = {name: own.detach().clone() for name, own in pipe.named_parameters()}
        return Trained(losses, norms, weights, weights_s / (inputs_s + weights_s) if weights_s else 0.0)


def _median_s(trace: Any, kind: Kind) -> float:
    return median([span.end_s - span.start_s for span in trace.spans if span.action.kind is kind] or [0.0])


@cache
def looped(dtype: torch.dtype, replicas: int, clip: float | None) -> Trained:
    """Train whole layers in a plain loop."""
    model = model_of(dtype)
    x, y = batch_of(dtype)
    optimizer = sgd(list(model.parameters()))
    losses, norms = [], []
    for number in range(STEPS):
        shape = {"num_microbatches": 8 // replicas, "num_replicas": replicas, "seed": SEED, "step": number}
        losses.append(float(reference_step(model, x, loss_fn=functional.mse_loss, target=y, **shape)))
        norms.append(None if clip is None else float(clip_grad_norm_(list(model.parameters()), clip)))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, {name: own.detach() for name, own in model.named_parameters()}, 0.0)


def block_of(name: str, whole: Tensor, rank: int, size: int) -> Tensor:
    """Return the block of a weight that a tensor rank holds; the whole weight if ``size`` is 1."""
    if ".up." in name:
        return whole.chunk(size)[rank]
    return whole.chunk(size, 1)[rank] if name.endswith("down.weight") else whole


def differences(case: Case, results: list[Trained]) -> dict[str, float]:
    """Return the largest relative differences from the plain loop: of losses, norms and weights."""
    due = looped(case.dtype, case.mesh[0], case.clip)
    size = 1 if case.zero == 3 else case.mesh[2]
    weights = [
        (own - (whole := block_of(name, due.weights[name], rank % size, size))).abs().max() / whole.abs().max()
        for rank, one in enumerate(results)
        for name, own in one.weights.items()
    ]
    return {
        "losses": max(_differences([one.losses for one in results], due.losses)),
        "norms": max(_differences([one.norms for one in results], due.norms), default=0.0),
        "weights": float(max(weights)),
    }


def _differences(found: list[list[Any]], due: list[Any]) -> list[float]:
    return [abs(a - b) / abs(b) for own in found for a, b in zip(own, due, strict=True) if b is not None]


def replanned(group: Any, case: Case, num_replicas: int | None = None) -> Trained:
    """Train, switch to a plan with other boundaries and another schedule after each step, and train on."""
    with pipeline(case, boundaries=[1]) as pipe:
        losses = [float(step(pipe, case))]
        for schedule, boundaries in (("zb-h1", [3]), ("1f1b", [2])):
            with warnings.catch_warnings(action="ignore"):
                plan = Pipeline(
                    model_of(case.dtype),
                    batch_of(case.dtype)[0][:4],
                    loss_fn=functional.mse_loss,
                    devices=["cpu"] * case.mesh[1],
                    schedule=schedule,
                    boundaries=boundaries,
                    num_microbatches=case.num_microbatches,
                    optimizer=sgd,
                    numerics=Numerics(clip_grad_norm=case.clip),
                ).plan
            done = pipe.replan(plan)
            assert list(map(len, done.plan.stages)) == [boundaries[0], 4 - boundaries[0]]
            assert done.moved_bytes > 0
            losses.append(float(step(pipe, case)))
        for _ in range(3):
            step(pipe, case)
        searched = pipe.replan(measure=True)
        assert searched.plan.program.num_ranks <= case.mesh[1]
        step(pipe, case)
        state = pipe.full_state_dict()
    return Trained(losses, [], state, 0.0)


def in_one_process(case: Case) -> list[float]:
    """Return the losses of the same pipeline of whole layers, whose ranks are threads of this process."""
    with (
        warnings.catch_warnings(action="ignore"),
        Pipeline(
            model_of(case.dtype),
            batch_of(case.dtype)[0][:4],
            loss_fn=functional.mse_loss,
            devices=["cpu"] * case.mesh[1],
            schedule=case.schedule,
            boundaries=boundaries_of(case),
            num_microbatches=case.num_microbatches,
            seed=SEED,
            optimizer=sgd,
        ) as pipe,
    ):
        x, y = batch_of(case.dtype)
        losses = [float(pipe.step(x, target=y)) for _ in range(STEPS)]
        last = pipe.flush()
        return losses if last is None else [*losses, float(last)]


def of_schedule(group: Any, case: Case) -> list[float]:
    """Return the losses of split layers."""
    with pipeline(case) as pipe:
        losses = [float(step(pipe, case)) for _ in range(STEPS)]
        last = pipe.flush()
        return losses if last is None else [*losses, float(last)]


def gradients(group: Any, case: Case) -> tuple[float, float]:
    """Return the largest relative differences of the loss and of the gradients of a step from a plain loop."""
    model = model_of(case.dtype)
    x, y = batch_of(case.dtype)
    options = {"target": y, "num_microbatches": case.num_microbatches, "seed": SEED}
    due = float(reference_step(model, x, loss_fn=functional.mse_loss, **options))
    whole = {name: own.grad for name, own in model.named_parameters()}
    with pipeline(case, optimizer=None) as pipe:
        loss = float(step(pipe, case))
        rank = distributed.get_rank() % case.mesh[2]
        found = [
            float((own.grad - (grad := block_of(name, whole[name], rank, case.mesh[2]))).abs().max() / grad.abs().max())
            for name, own in pipe.named_parameters()
        ]
    return abs(loss - due) / due, max(found)


def refused(group: Any) -> dict[str, str]:
    """Return the errors of options that split layers do not allow."""
    case = Case()
    distributed_options = {
        "redundancy=": {"redundancy": "neighbour", "on_failure": "recover"},
        "no pattern": {"tensor_parallel": {"nothing": "column"}},
        "no mapping": {"tensor_parallel": "column"},
    }
    found = {
        "wrap=": said(lambda: pipeline(case, wrap=lambda module, stage: module)),
        "compile=": said(lambda: pipeline(case, compile=True)),
        "devices=": said(lambda: pipeline(case, mesh=None, devices=["cpu", "cpu"], distributed={"timeout": None})),
        "sums": said(lambda: pipeline(case, model=nn.Sequential(*(Sums() for _ in range(4))))),
        "no axis": said(lambda: pipeline(case, mesh=rank_processes.mesh_of((2, 2), ("dp", "pp")))),
    }
    for name, options in distributed_options.items():
        found[name] = said(lambda options=options: Distributed(**options) and pipeline(case, distributed=options))
    return found


def said(call: Any) -> str:
    """Return the error of a call as text; "" without an error."""
    try:
        call().close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def error_of(outputs: Tensor, target: Tensor) -> dict[str, Tensor]:
    """The metrics of a micro-batch."""
    return {"error": (outputs - target).abs().mean()}


def surface(group: Any) -> dict[str, Any]:
    """Return what each process gets from the methods of a pipeline of split layers, and the largest differences."""
    case = Case(clip=None)
    model = model_of()
    x, y = batch_of()
    found: dict[str, Any] = {}
    with pipeline(case, optimizer=None) as pipe:
        step(pipe, case, metrics=error_of)
        found["metrics"] = {name: float(value) for name, value in pipe.metrics.items()}
        found["norm"] = float(pipe.clip_grad_norm_(0.1))
        reference_step(model, x, loss_fn=functional.mse_loss, target=y, num_microbatches=8, seed=SEED)
        found["due norm"] = float(clip_grad_norm_(list(model.parameters()), 0.1))
        trace = pipe.gather_trace()
        found["ranks"] = sorted({span.action.stage for span in trace.spans})
        found["plan"] = str(pipe.plan.program), pipe.plan.stages
        found["text"] = str(pipe)
        found["memory"] = [rank.total_bytes for rank in pipe.predicted_memory]
        pipe.eval()
        model.eval()
        loss, outputs = pipe.evaluate(x, target=y, return_outputs=True, gather=True)
        with torch.no_grad():
            due = model(x)
            found["outputs"] = float((outputs - due).abs().max())
            found["forward"] = float((pipe(x, gather=True) - due).abs().max())
            found["one rank"] = pipe(x) is None
        found["loss"] = float(loss), float(functional.mse_loss(due, y))
    return found


def other_batches(group: Any, which: str) -> str:
    """Return the error of a step in which the second plane passes other values, or other rows."""
    case = Case()
    x, y = batch_of()
    second = distributed.get_rank() % 2
    with pipeline(case) as pipe:
        if which == "values":
            return said(lambda: pipe.step(x + second, target=y))
        size = ROWS - 8 * second
        return said(lambda: pipe.step(x[:size], target=y[:size]))


def other_styles(group: Any) -> str:
    """Return the error of a pipeline for which the second plane names other layers."""
    split = SPLIT if distributed.get_rank() % 2 == 0 else {"0.up": "column", "0.down": "row"}
    return said(lambda: pipeline(Case(), distributed={"tensor_parallel": split}))


def other_replicas(group: Any) -> tuple[list[float], list[float]]:
    """Train in two replicas and then in one, each with split layers. Return the losses, and those of a plain loop."""
    case = Case(mesh=(2, 1, 2), clip=None)
    x, y = batch_of()
    with warnings.catch_warnings(action="ignore"):
        plan = Pipeline(
            model_of(),
            x[:4],
            loss_fn=functional.mse_loss,
            devices=["cpu"] * 2,
            schedule="1f1b",
            boundaries=[2],
            num_microbatches=8,
            optimizer=sgd,
        ).plan
    with pipeline(case) as pipe:
        losses = [float(step(pipe, case))]
        pipe.replan(plan, num_replicas=1)
        losses += [float(pipe.step(x, target=y)) for _ in range(2)]
    return losses, looped(torch.float32, 1, None).losses


def costs(group: Any, latency_s: float) -> Any:
    """Return the predicted times of the actions of each stage, over links with this latency."""
    links = Links(inside=Link(latency_s))
    with pipeline(Case(schedule="zb-h1", clip=None), search=Search(links=links), boundaries=[2]) as pipe:
        own = pipe.predicted.costs
        return own.forward_s, own.input_grad_s, own.weight_grad_s


def cut_between(group: Any, boundary: int) -> float:
    """Return the difference of the losses from a plain loop if a stage begins where activations are divided."""

    def flat() -> nn.Sequential:
        torch.manual_seed(0)
        parts = [(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * WIDTH, WIDTH)) for _ in "ab"]
        return nn.Sequential(*(layer for part in parts for layer in part))

    split = {"0": "column", "3": "row", "4": "column", "7": "row"}
    case = Case(clip=None)
    with pipeline(case, model=flat(), boundaries=[boundary], distributed={"tensor_parallel": split}) as pipe:
        losses = [float(step(pipe, case)) for _ in range(2)]
    model = flat()
    optimizer = sgd(list(model.parameters()))
    x, y = batch_of()
    differences = []
    for number, loss in enumerate(losses):
        options = {"target": y, "num_microbatches": 8, "seed": SEED, "step": number}
        differences.append(abs(loss - float(reference_step(model, x, loss_fn=functional.mse_loss, **options))))
        optimizer.step()
        optimizer.zero_grad()
    return max(differences)


def with_options(group: Any, schedule: str, options: dict[str, Any]) -> list[float]:
    """Return the losses with other options."""
    case = Case(schedule=schedule, clip=None)
    with pipeline(case, **options) as pipe:
        return [float(step(pipe, case)) for _ in range(STEPS)]


def encoder(dtype: torch.dtype) -> nn.Sequential:
    """Return a model of four blocks of a transformer, between two norms."""
    torch.manual_seed(0)
    made = [
        nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True, dtype=dtype)
        for _ in range(4)
    ]
    return nn.Sequential(nn.LayerNorm(WIDTH, dtype=dtype), *made, nn.LayerNorm(WIDTH, dtype=dtype))


#: Inside each block the sequence is divided; or in the whole model, also where a stage begins.
OF_SEQUENCE: dict[str, tuple[Any, dict[str, Any]]] = {
    "inside blocks": (
        model_of,
        {
            "*.norm": "sequence-begin",
            "*.up": Column(sequence=True),
            "*.down": Row(sequence=True),
            "*.outer": "sequence-end",
        },
    ),
    "between stages": (
        encoder,
        {"0": "sequence-begin", **{str(at): EncoderBlock(sequence=True) for at in range(1, 5)}, "5": "sequence-end"},
    ),
}


def by_sequence(group: Any, where: str, schedule: str, dtype: torch.dtype) -> list[float]:
    """Return the losses and norms of split layers with sequence parallelism."""
    make, styles = OF_SEQUENCE[where]
    case = Case(schedule=schedule, dtype=dtype)
    found: list[float] = []
    options = {"distributed": {"tensor_parallel": styles}, "num_microbatches": 4}
    with pipeline(case, model=make(dtype), **options) as pipe:
        for _ in range(2):
            found.append(float(step(pipe, case)))
            assert pipe.grad_norm is not None
            found.append(float(pipe.grad_norm))
    return found


def whole_by_sequence(where: str, dtype: torch.dtype) -> list[float]:
    """Return the losses and norms of whole layers in a plain loop."""
    make, _ = OF_SEQUENCE[where]
    x, y = batch_of(dtype)
    model, due = make(dtype), []
    optimizer = sgd(list(model.parameters()))
    for number in range(2):
        shape = {"num_microbatches": 4, "seed": SEED, "step": number}
        due.append(float(reference_step(model, x, loss_fn=functional.mse_loss, target=y, **shape)))
        due.append(float(clip_grad_norm_(list(model.parameters()), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return due
