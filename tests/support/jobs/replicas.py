"""Jobs of the tests of replicas: they train replicas, and compare with the same training in a plain loop."""

import warnings
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from pipesched import Distributed, Numerics, Pipeline, StepLog
from pipesched.errors import PipeschedError
from pipesched.runtime.rank_grid import grid_of
from pipesched.testing import clip_grad_norm_, reference_step
from tests.support import rank_processes
from tests.support.added_losses import Experts

ROWS, MICROBATCHES, STEPS, SEED = 16, 8, 2, 3  # ROWS and MICROBATCHES count those of all replicas together
VOCABULARY = 11
#: Name of a parameter or buffer -> its value, and its gradient or None.
State = dict[str, tuple[Tensor, Tensor | None]]


class TiedModel(nn.Module):
    """A model whose embedding and head share a weight, with dropout and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.first, self.second, self.third = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.last = nn.LayerNorm(16)
        self.norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(0.2)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.dropout(torch.relu(self.first(self.embedding(tokens))))
        hidden = self.last(torch.tanh(self.third(hidden)))
        return self.head(self.norm(torch.relu(self.second(hidden))))


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(16, 4))


def tied_model() -> TiedModel:
    torch.manual_seed(0)
    return TiedModel()


def plain_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(ROWS, 8, generator=generator), torch.randn(ROWS, 4, generator=generator)


def tied_batch() -> tuple[Tensor, Tensor]:
    """Tokens and labels; the replicas have different numbers of labels that are not -100."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    labels[:5] = labels[9] = -100
    return torch.randint(0, VOCABULARY, (ROWS,), generator=generator), labels


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]], Callable[[], Any]]] = {
    "plain": (plain_model, plain_batch, lambda: functional.mse_loss),
    "tied": (tied_model, tied_batch, nn.CrossEntropyLoss),
}
#: The ways to divide four ranks: (number of replicas, ranks per replica).
MESHES = (2, 2), (4, 1), (1, 4)
SCHEDULES = "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v", "chimera"


class Case(NamedTuple):
    """The options of a training run.

    With ``updates``, steps clip gradients and update the weights; otherwise gradients accumulate. With ``zero``,
    replicas divide optimizer states (1), also gradients (2) or also weights (3).
    """

    model: str
    mesh: tuple[int, int]
    schedule: str
    updates: bool
    inputs: Literal["all", "first"]
    zero: int = 0

    def __str__(self) -> str:
        size = "x".join(map(str, self.mesh))
        kept = "optimizer" if self.updates else "gradients"
        return f"{self.model} {size} {self.schedule} {kept} {self.inputs} zero={self.zero}"

    @property
    def num_parts(self) -> int:
        """The number of parts into which replicas divide a gradient. A norm is computed for each part."""
        return self.mesh[0] if self.zero >= 2 else 1


def cases() -> list[Case]:
    every = map(Case._make, product(MODELS, MESHES, SCHEDULES, (False, True), ("all", "first"), range(4)))
    shared = [case for case in every if case.schedule != "chimera" or not (case.updates or case.mesh[1] == 1)]
    return [case for case in shared if not case.zero or (case.updates and case.mesh[0] > 1)]


class Trained(NamedTuple):
    losses: list[float]
    state: State
    num_reductions: int = 0


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] = ("dp", "pp")) -> DeviceMesh:
    return rank_processes.mesh_of(shape, names)


def sgd(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def state_of(model: Any) -> State:
    named = {name: (p.detach().clone(), None if p.grad is None else p.grad.clone()) for name, p in named_of(model)}
    return {**named, **{name: (buffer.clone(), None) for name, buffer in model.named_buffers()}}


def named_of(model: Any) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def pipeline(mesh: DeviceMesh, model: nn.Module, sample: Any, **options: Any) -> Pipeline:
    given = options.pop("distributed", Distributed(timeout=20))
    with warnings.catch_warnings(action="ignore"):
        return Pipeline(model, sample, mesh=mesh, distributed=given, **{"seed": SEED, **options})


def trained(group: Any, case: Case, mesh: DeviceMesh | None = None) -> Trained:
    """Train the case's model in replicas, each on its own rows. If ``inputs`` is "first", rank 0 passes all rows."""
    make, make_batch, make_loss = MODELS[case.model]
    mesh = mesh or mesh_of(case.mesh)
    replicas = case.mesh[0]
    x, y = make_batch()
    pipe = pipeline(
        mesh,
        make(),
        x[:2],
        loss_fn=make_loss(),
        schedule=case.schedule,
        num_microbatches=MICROBATCHES // replicas,
        optimizer=sgd if case.updates else None,
        numerics=Numerics(batch_norm="mini-batch", clip_grad_norm=0.5 if case.updates else None),
        distributed=Distributed(inputs=case.inputs, timeout=20, zero=case.zero),
    )
    own = own_rows(mesh.get_local_rank("dp"), replicas)
    with pipe:
        losses = []
        for _ in range(STEPS):
            if case.inputs == "all":
                losses.append(float(pipe.step(x[own], target=y[own])))
            elif group.rank():
                losses.append(float(pipe.step()))
            else:
                losses.append(float(pipe.step(x, target=y)))
        reductions = sum(str(span.action.kind) == "REDUCE" for span in pipe.trace.spans)
        if case.zero == 3:
            pipe.gather_model()
        return Trained(losses, state_of(pipe), reductions)


def own_rows(replica: int, replicas: int) -> slice:
    return slice(ROWS * replica // replicas, ROWS * (replica + 1) // replicas)


@cache
def looped(name: str, replicas: int, updates: bool, num_parts: int = 1) -> Trained:
    """Run the training of `trained` in a plain loop over the micro-batches of all replicas."""
    make, make_batch, make_loss = MODELS[name]
    model = make()
    x, y = make_batch()
    optimizer = sgd(list(model.parameters()))
    losses = []
    for step in range(STEPS):
        shape = {"num_microbatches": MICROBATCHES // replicas, "num_replicas": replicas}
        options: dict[str, Any] = {**shape, "seed": SEED, "step": step, "batch_norm": "mini-batch"}
        losses.append(float(reference_step(model, x, loss_fn=make_loss(), target=y, **options)))
        if updates:
            clip_grad_norm_(list(model.parameters()), 0.5, num_shards=num_parts)
            optimizer.step()
            optimizer.zero_grad()
    return Trained(losses, state_of(model))


def differing(case: Case, results: list[Trained]) -> list[str]:
    """Return the names of the values that no rank holds, or that differ from the plain loop's on some rank.

    Compares bits, except for chimera, whose gradients equal those of the loop only within rounding.
    """
    expected = looped(case.model, case.mesh[0], case.updates, case.num_parts)
    equal = close if case.schedule == "chimera" else same
    odd = ["the loss"] * any(own.losses != expected.losses for own in results)
    odd += sorted({name for own in results for name in own.state if not equal(own.state[name], expected.state[name])})
    return odd + sorted(expected.state.keys() - {name for own in results for name in own.state})


def same(ours: tuple[Tensor, Tensor | None], theirs: tuple[Tensor, Tensor | None]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def close(ours: tuple[Tensor, Tensor | None], theirs: tuple[Tensor, Tensor | None]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(a is b if a is None or b is None else torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs)


def small_model(*layers: Callable[[], nn.Module]) -> nn.Sequential:
    """Return two linear layers with other layers in between. Each call returns equal weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *(make() for make in layers), nn.Linear(8, 4))


def small(mesh: DeviceMesh, model: nn.Module | None = None, **options: Any) -> Pipeline:
    """Return a pipeline of a small model, with four micro-batches per replica."""
    named: dict[str, Any] = {"schedule": "1f1b", "num_microbatches": 4, "loss_fn": functional.mse_loss}
    x, _ = plain_batch()
    return pipeline(mesh, small_model() if model is None else model, x[:2], **named | options)


def own_batch(mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    x, y = plain_batch()
    own = own_rows(mesh.get_local_rank("dp"), mesh["dp"].size())
    return x[own], y[own]


def said(call: Callable[[], Any]) -> str:
    """Return the error of a call as text; "" without an error."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused(group: Any) -> dict[str, str]:
    """Return the errors of pipelines that do not support replicas, and the warning about buffers."""
    mesh = mesh_of((2, 2))
    found = {
        "BatchNorm": said(lambda: small(mesh, small_model(partial(nn.BatchNorm1d, 8)))),
        "updates": said(lambda: small(mesh, schedule="pipedream", optimizer=sgd)),
        "axes": said(lambda: small(mesh, axes={"pipeline": "pp", "replicate": "pp"})),
        "names": said(lambda: small(mesh, axes={"pipeline": "pp", "replicate": "data"})),
        "shards": said(lambda: small(mesh, wrap=lambda module, stage: fully_shard(module, mesh=mesh["dp"]))),
        "sparse": said(lambda: _sparse(mesh)),
    }
    odd = {"pipeline": "dp", "replicate": "pp"} if group.rank() == 2 else None
    found["different axes"] = said(lambda: small(mesh, axes=odd))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x, _ = plain_batch()
        Pipeline(small_model(Counter), x[:2], mesh=mesh, loss_fn=functional.mse_loss, schedule="1f1b").close()
    found["buffers"] = "".join(str(one.message) for one in caught if "buffers" in str(one.message))
    return found


def _sparse(mesh: DeviceMesh) -> None:
    tokens = torch.arange(8) % 4
    model = nn.Sequential(nn.Embedding(4, 8, sparse=True), nn.Linear(8, 4))
    pipe = pipeline(mesh, model, tokens[:2], loss_fn=nn.CrossEntropyLoss(), schedule="1f1b", num_microbatches=2)
    pipe.step(tokens, target=tokens)


class Counter(nn.Module):
    """A layer that counts rows in an integer buffer, with a complex, non-contiguous buffer and a bfloat16 weight."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.zeros(3, 2, dtype=torch.complex64).T)
        self.scale = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        self.count += len(x)
        return x * self.scale


def starts_equal(group: Any) -> bool:
    """Return whether all replicas start with the weights of replica 0, although replica 1 was made with others."""
    mesh = mesh_of((2, 2))
    model = small_model(Counter)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    if mesh.get_local_rank("dp"):
        with torch.no_grad():
            for value in model.state_dict().values():
                value.add_(1)
    with small(mesh, model) as pipe:
        return all(torch.equal(value, expected[name]) for name, value in pipe.state_dict().items())


def bad_batches(group: Any) -> list[str]:
    """Return the errors of calls in which replica 1 passes a wrong batch. A good step follows each call.

    Also checks losses, outputs and metrics of evaluations.
    """
    mesh = mesh_of((2, 2))
    x, y = own_batch(mesh)
    second = mesh.get_local_rank("dp") == 1
    found = []
    with small(mesh) as pipe:
        expected = float(pipe.step(x, target=y))
        short = slice(3) if second else slice(None)
        for call in (
            lambda: pipe.step(x[short], target=y[short]),
            lambda: pipe.evaluate(x[short], target=y[short]),
            lambda: pipe.step(x, target=y[:5] if second else y),
            lambda: pipe.step(x, target=None if second else y),
        ):
            found.append(said(call))
            pipe.step(x, target=y)
        assert float(pipe.evaluate(x, target=y)) == expected
        with torch.no_grad():
            output = pipe.forward(x)
            expected_output = torch.cat([small_model()(rows) for rows in x.split(2)])  # 4 micro-batches
            assert output is None or torch.equal(output, expected_output)
            every_x, every_y = plain_batch()
            error = (small_model()(every_x) - every_y).abs()
            pipe.evaluate(x, target=y, metrics=scores)
            assert torch.allclose(pipe.metrics["error"].float(), error.mean())
            uneven = slice(7) if second else slice(8)
            pipe.evaluate(x[uneven], target=y[uneven], metrics=scores)
            assert torch.allclose(pipe.metrics["error"].float(), error[:15].mean())
    return found


def finds_nonfinite(group: Any, how: str, *, updates: bool, tied: bool = False) -> tuple[str, bool]:
    """Run a step whose loss is NaN in one micro-batch of one replica, while all gradients are finite.

    Returns the error and warnings, and whether weights changed.
    """
    mesh = mesh_of((2, 2))
    x, y = own_batch(mesh)
    if mesh.get_local_rank("dp"):
        y[4] = 1e30
    optimizer = sgd if updates else None
    model = small_model(nn.Tanh)
    if tied:
        model = small_model(partial(nn.Linear, 8, 8))
        model[1].weight = model[0].weight
    options: dict[str, Any] = {"loss_fn": spoilt, "optimizer": optimizer}
    with small(mesh, model, numerics=Numerics(on_nonfinite=how), **options) as pipe:
        before = [parameter.detach().clone() for parameter in pipe.parameters()]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            text = said(lambda: pipe.step(x, target=y))
        text += "".join(str(one.message) for one in caught)
        after = list(pipe.parameters())
        return text, not all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def spoilt(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean output, plus NaN if a target is very large. NaN is a constant, so gradients stay finite."""
    return output.mean() + (torch.nan if target.max() > 1e29 else 0.0)


class Rare(nn.Module):
    """A layer with three linear layers: one is used only if ``uses`` is set, one is frozen, one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.rare, self.frozen, self.idle = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
        self.uses = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(x)
        return self.rare(x) if self.uses else x


def uses_some_weights(group: Any) -> list[str]:
    """Return the names of this rank's parameters that get a gradient if only replica 1 uses a layer."""
    mesh = mesh_of((2, 2))
    x, y = own_batch(mesh)
    model = small_model(Rare)
    with small(mesh, model, schedule="zb-h1", boundaries=[2]) as pipe:
        model[1].uses = mesh.get_local_rank("dp") == 1
        for _ in range(2):
            pipe.step(x, target=y)
        return sorted(name for name, parameter in pipe.named_parameters() if parameter.grad is not None)


def scores(outputs: Tensor, target: Tensor) -> dict[str, Any]:
    return {"error": (outputs - target).abs().mean(), "largest": outputs.max()}


def adds_and_measures(group: Any) -> list[dict[str, float]]:
    """Return the metrics of steps whose layers add losses, for two pipelines that run at the same time.

    Checks that losses and gradient norms are bit-identical to those of a plain loop.
    """
    mesh = mesh_of((2, 2))
    x, y = own_batch(mesh)
    expected = small_model(Experts)
    whole_x, whole_y = plain_batch()
    loop: dict[str, Any] = {"loss_fn": functional.mse_loss, "num_microbatches": 4, "num_replicas": 2, "seed": SEED}
    models = [small_model(Experts) for _ in range(2)]
    found = []
    with small(mesh, models[0]) as first, small(mesh, models[1], schedule="auto") as second:
        for step in range(2):
            due = reference_step(expected, whole_x, target=whole_y, step=step, **loop)
            for pipe in (first, second):
                assert torch.equal(pipe.step(x, target=y, metrics=scores), due)
                found.append({name: float(value) for name, value in pipe.metrics.items()})
        for pipe in (first, second):
            norm = pipe.clip_grad_norm_(0.1)
            assert norm == clip_grad_norm_(with_grad(expected), 0.1)
        assert len({str(text) for text in group_values(group, str(second.plan.program))}) == 1
        lines: list[str] = []
        logged = StepLog(first, show=lines.append)(1.0)
        assert (logged is None, len(lines)) == ((False, 1) if group.rank() == 0 else (True, 0))
    return found


def with_grad(model: nn.Module) -> list[nn.Parameter]:
    """Return copies of a model's parameters with their gradients."""
    made = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    for new, parameter in zip(made, model.parameters(), strict=True):
        new.grad = None if parameter.grad is None else parameter.grad.clone()
    return made


def group_values(group: Any, value: Any) -> list[Any]:
    values: list[Any] = [None] * group.size()
    distributed.all_gather_object(values, value, group=group)
    return values


def overflows(group: Any) -> list[tuple[float, bool]]:
    """Train three steps with a scaler. In the second step, gradients of replica 1 overflow.

    Returns, for each step, the loss scale and whether weights changed.
    """
    mesh = mesh_of((2, 2))
    x, y = own_batch(mesh)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    found = []
    with small(mesh, optimizer=sgd, numerics=Numerics(scaler=scaler)) as pipe:
        for step in range(3):
            before = [parameter.detach().clone() for parameter in pipe.parameters()]
            factor = torch.inf if step == 1 and mesh.get_local_rank("dp") else 1.0
            pipe.step(x * factor, target=y)
            changed = not all(torch.equal(old, new) for old, new in zip(before, pipe.parameters(), strict=True))
            found.append((scaler.get_scale(), changed))
    return found


def sharded(group: Any) -> None:
    """Shard stages by fully_shard over a third mesh dimension. Check that gradients agree with a plain loop's."""
    mesh = mesh_of((2, 2, 1), ("dp", "fsdp", "pp"))
    x, y = plain_batch()
    own = own_rows(mesh.get_local_rank("dp"), 2)
    expected = small_model()
    loop: dict[str, Any] = {"loss_fn": functional.mse_loss, "num_microbatches": 4, "num_replicas": 2, "seed": SEED}
    axes = {"pipeline": "pp", "replicate": "dp"}
    with small(mesh, axes=axes, wrap=lambda module, stage: fully_shard(module, mesh=mesh["fsdp"])) as pipe:
        for step in range(2):
            due = reference_step(expected, x, target=y, step=step, **loop)
            assert torch.allclose(pipe.step(x[own], target=y[own]), due)
            for name, parameter in pipe.named_parameters():
                grad: Any = parameter.grad
                assert torch.allclose(grad.full_tensor(), expected.get_parameter(name).grad, atol=1e-6)  # type: ignore[arg-type]


def hybrid(group: Any, shape: tuple[int, int, int], schedule: str, *, part: bool = False) -> list[float]:
    """Train stages that fully_shard divides over replicas. Return the relative errors against a plain loop.

    The errors are those of losses, gradients, norms and weights. Each replica has its own rows, with unequal numbers of
    labels. ``part``: whether only one layer of a stage is sharded.
    """
    mesh = mesh_of(shape, ("dp", "fsdp", "pp"))
    replicas = shape[0] * shape[1]
    replica = mesh.get_local_rank("dp") * shape[1] + mesh.get_local_rank("fsdp")
    x, _ = plain_batch()
    labels = tied_batch()[1] % 4
    labels[:5] = labels[9] = -100
    own = own_rows(replica, replicas)
    expected = plain_model()
    count = MICROBATCHES // replicas

    def shard(module: nn.Module, stage: int) -> nn.Module:
        linears = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
        for layer in linears[:1] if part else [*linears, module]:
            fully_shard(layer, mesh=mesh["fsdp"])
        return module

    shared: dict[str, Any] = {"num_microbatches": count, "seed": SEED}
    loop = {"loss_fn": nn.CrossEntropyLoss(), "num_replicas": replicas, **shared}
    with pipeline(
        mesh, plain_model(), x[:2], loss_fn=nn.CrossEntropyLoss(), schedule=schedule, wrap=shard, **shared
    ) as pipe:
        optimizers = [torch.optim.AdamW(held.parameters(), lr=0.01) for held in (pipe, expected)]
        errors = []
        for step in range(STEPS):
            due = reference_step(expected, x, target=labels, step=step, **loop)
            errors.append(float((pipe.step(x[own], target=labels[own]) - due).abs() / due))
            for name, parameter in pipe.named_parameters():
                mine: Any = parameter.grad
                grad = expected.get_parameter(name).grad
                assert grad is not None
                whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
                errors.append(float((whole - grad).norm() / grad.norm()))
            norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
            errors.append(float((pipe.clip_grad_norm_(0.1) - norm).abs() / norm))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        state = pipe.full_state_dict()
        errors += [float((state[name] - value).norm() / value.norm()) for name, value in expected.state_dict().items()]
        return errors


def grids(group: Any) -> dict[str, Any]:
    """Return, for several meshes, the rows of the rank grid, or the error if the mesh has no grid."""

    def rows(mesh: Any, axes: Any = None) -> Any:
        try:
            return grid_of(mesh, axes, 1.0)[1].rows
        except PipeschedError as error:
            return str(error)

    mesh = mesh_of((2, 2))
    return {
        "by names": rows(mesh_of((2, 2), ("dp_replicate", "pp"))),
        "pipelines first": rows(mesh_of((2, 2), ("pp", "dp"))),
        "one dimension": rows(mesh["pp"]),
        "any names": rows(mesh_of((2, 2), ("a", "b")), {"pipeline": "b", "replicate": "a"}),
        "unknown names": rows(mesh_of((2, 2), ("a", "b"))),
        "one more dimension": rows(mesh_of((2, 1, 2), ("dp", "tp", "pp"))),
        "unknown dimension": rows(mesh_of((2, 1, 2), ("dp", "x", "pp"))),
        "no names": rows(init_device_mesh("cpu", (2, 2))),
        "two kinds of replicas": rows(mesh_of((2, 2, 1), ("dp_replicate", "dp_shard", "pp"))),
        "other axes": rows(mesh, {"pipeline": "pp", "data": "dp"}),
        "no mapping": rows(mesh, "pp"),
        "no mesh": rows(group),
    }


def trained_on_part(group: Any, case: Case) -> Trained | str:
    """Train on the dimensions "dp" and "pp" of a larger mesh, or return why this mesh is refused."""
    names = ("dp", "pp", "tp")
    for count in (1, 2, 3):
        distributed.new_group(list(range(count)))  # so that the processes are in different numbers of groups
    mesh = init_device_mesh("cpu", (*case.mesh, 2), mesh_dim_names=names)["dp", "pp"]
    try:
        grid_of(mesh, None, 1.0)
    except PipeschedError as error:
        return str(error)
    return trained(group, case, mesh)


def counts_groups_apart(group: Any) -> str:
    """Return why a part of a mesh is refused after half of the processes have made groups on their own."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "pp", "tp"))["dp", "pp"]
    alone = partial(distributed.new_group, [group.rank()], use_local_synchronization=True)
    if group.rank() < 2:
        alone()
    try:
        grid_of(mesh, None, 1.0)
    except PipeschedError as error:
        return str(error)
    finally:
        if group.rank() >= 2:
            alone()
    return "not refused"
