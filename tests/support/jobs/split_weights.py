"""Jobs that train, save and load models whose weights the ranks of a tensor group divide."""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from pipesched import Distributed, Numerics, Pipeline, with_master_weights
from pipesched.parallel.layer_styles import Column
from pipesched.saving import writing
from pipesched.saving.manifest import Manifest
from pipesched.testing import clip_grad_norm_, reference_step

WIDTH, WORDS, BLOCKS, MICROBATCHES, SEED = 16, 24, 4, 4, 11
CLIP = 0.4  # most steps have a larger norm
STYLES: dict[str, Any] = {
    "embed": "vocabulary",
    "blocks.*.mixed": Column(sections=3),
    "blocks.*.out": "row",
    "head": "column-gathered",
}


def is_split(name: str) -> bool:
    """Whether the ranks of a tensor group divide a parameter."""
    return name in ("embed.weight", "head.weight") or ".mixed." in name or name.endswith(".out.weight")


class Block(nn.Module):
    """Three projections in one weight, and a projection back."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixed(self.norm(x)).chunk(3, -1)
        return x + self.drop(self.out(torch.tanh(q) * torch.sigmoid(k) + v))


class Net(nn.Module):
    """Blocks between an embedding and a head, which may share a weight."""

    def __init__(self, *, tied: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Case:
    """The ranks, the model and the options of a run."""

    #: The numbers of replicas, ranks of a pipeline, and planes. None: one process.
    dims: tuple[int, int, int] | None
    tied: bool = True
    frozen: bool = False  # whether the embedding is frozen
    dropout: float = 0.1
    zero: int = 0
    schedule: str = "1f1b"
    dtype: torch.dtype = torch.float64
    own_optimizer: bool = True  # whether the pipeline has optimizer=

    @property
    def num_ranks(self) -> int:
        dp, pp, tp = self.dims or (1, 1, 1)
        return dp * pp * tp

    def model(self, seed: int = 0) -> Net:
        torch.manual_seed(seed)
        model = Net(tied=self.tied, dropout=self.dropout).to(self.dtype)
        model.embed.weight.requires_grad_(not self.frozen)
        return model


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    shape = 16, 5
    return torch.randint(WORDS, shape, generator=generator), torch.randint(WORDS, shape, generator=generator)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


_MESHES: dict[tuple[int, int, int], DeviceMesh] = {}


def mesh_of(dims: tuple[int, int, int]) -> DeviceMesh:
    if dims not in _MESHES:
        names = ("dp", "pp", "tp") if dims[2] > 1 else ("dp", "pp")
        members = torch.arange(dims[0] * dims[1] * dims[2]).view(dims if dims[2] > 1 else dims[:2])
        _MESHES[dims] = DeviceMesh("cpu", members, mesh_dim_names=names)
    return _MESHES[dims]


def made(case: Case, model: Any, *, optimizer: Any = adam, **options: Any) -> Pipeline:
    where: dict[str, Any] = {"devices": ["cpu"] * 2}
    if case.dims is not None:
        styles = options.pop("styles", STYLES) if case.dims[2] > 1 else None
        if styles is STYLES and not case.tied:
            styles = STYLES | {"head": "column-gathered"}
        where = {
            "mesh": mesh_of(case.dims),
            "distributed": Distributed(timeout=60, zero=case.zero, tensor_parallel=styles),
        }
    num_replicas, num_ranks = (1, 2) if case.dims is None else case.dims[:2]
    layers = ["embed", *(f"blocks.{at}" for at in range(BLOCKS)), "norm", "head"]
    numerics = options.pop("numerics", Numerics(clip_grad_norm=CLIP if case.own_optimizer else None))
    with warnings.catch_warnings(action="ignore"):
        return Pipeline(
            model,
            batch(0)[0][:2],
            loss_fn=loss_of,
            schedule=case.schedule,
            num_microbatches=MICROBATCHES // num_replicas,
            boundaries=[layers[len(layers) * rank // num_ranks] for rank in range(1, num_ranks)],
            optimizer=optimizer if case.own_optimizer else None,
            numerics=numerics,
            seed=SEED,
            **where,
            **options,
        )


class Run:
    """A pipeline with its optimizer."""

    def __init__(self, case: Case, model: Any, **options: Any) -> None:
        self.case = case
        self.pipe = made(case, model, **options)
        self.optimizer = None if case.own_optimizer else adam(self.pipe.parameters())
        self.norms: list[float] = []

    @property
    def states(self) -> dict[str, Any]:
        return {} if self.optimizer is None else {"optimizer": self.optimizer}

    def train(self, steps: range) -> list[float]:
        losses = []
        dims = self.case.dims or (1, 1, 1)
        replica = 0 if dims[0] == 1 else mesh_of(dims).get_local_rank("dp")
        for step in steps:
            x, y = (rows.chunk(dims[0])[replica] for rows in batch(step))
            losses.append(float(self.pipe.step(x, target=y)))
            if self.optimizer is not None:
                self.norms.append(float(self.pipe.clip_grad_norm_(CLIP)))
                self.optimizer.step()
                self.optimizer.zero_grad()
            else:
                self.norms.append(float(self.pipe.grad_norm))
        return losses


def first_half(
    group: Any, case: Case, path: str, steps: int = 3, **options: Any
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train, save, and return the losses, the norms and the whole weights."""
    run = Run(case, case.model())
    with run.pipe as pipe:
        losses = run.train(range(steps))
        pipe.save(path, **run.states, **options)
        return losses, run.norms, cloned(pipe.full_state_dict())


def second_half(
    group: Any, case: Case, path: str, steps: int = 3
) -> tuple[list[float], list[float], dict[str, Tensor], list[str]]:
    """Load into a model with other weights, train on, and return the losses, the norms, the weights and warnings."""
    run = Run(case, case.model(seed=7))
    with run.pipe as pipe, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        restored = pipe.load(path, **run.states)
        assert restored.step == steps
        losses = run.train(range(steps, 2 * steps))
        return losses, run.norms, cloned(pipe.full_state_dict()), [str(one.message) for one in said]


def loop(case: Case, steps: range, model: nn.Module, optimizer: Any) -> tuple[list[float], list[float]]:
    """Train in plain PyTorch, and return the losses and the norms."""
    losses, norms = [], []
    num_replicas = (case.dims or (1, 1, 1))[0]
    for step in steps:
        x, y = batch(step)
        options: dict[str, Any] = {"num_microbatches": MICROBATCHES // num_replicas, "num_replicas": num_replicas}
        losses.append(float(reference_step(model, x, target=y, loss_fn=loss_of, seed=SEED, step=step, **options)))
        norms.append(float(clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def cloned(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}


def files_of(path: str) -> dict[str, str]:
    """Return the digests of the data files of a checkpoint."""
    manifest = Manifest.read(Path(path))
    return {name: entry.sha256 for name, entry in manifest.files.items()}


def said(call: Callable[[], Any]) -> str:
    """Return the error of a call as text; "" without an error."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def saved_again(group: Any, case: Case, path: str, other: str, asynchronous: bool) -> None:
    """Load a checkpoint, and save the run again without a step."""
    run = Run(case, case.model(seed=7))
    with run.pipe as pipe, warnings.catch_warnings(action="ignore"):
        pipe.load(path)
        pipe.save(other, asynchronous=asynchronous)


def masters_saved(group: Any, case: Case, path: str, other: str) -> None:
    """Train with float32 copies of bfloat16 weights, or load a run, and save."""
    run = Run(case, case.model(), optimizer=lambda parameters: with_master_weights(adam(parameters)))
    with run.pipe as pipe, warnings.catch_warnings(action="ignore"):
        if path:
            pipe.load(path)
        else:
            run.train(range(2))
        pipe.save(other)


# ---- whole weights outside of checkpoints -------------------------------------------------------------------------


def plain_loss(model: nn.Module) -> float:
    """Return the loss of a batch in plain PyTorch, without dropout."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    x, y = batch(50)
    with torch.no_grad():
        loss = float(loss_of(model(x), y))
    for module, mode in modes.items():
        module.training = mode
    return loss


def gathered(group: Any, case: Case) -> dict[str, Any]:
    """Train, gather the model, use it, and train on, also with changed weights."""
    found: dict[str, Any] = {}
    model = case.model()
    run = Run(case, model)
    with run.pipe as pipe:
        losses = run.train(range(2))
        found["stale"] = said(lambda: model(batch(0)[0]))
        state = cloned(pipe.full_state_dict())
        own = pipe.state_dict() if case.zero < 3 else {}
        found["own"] = all(torch.equal(value, state[name]) for name, value in own.items()), len(own), len(state)
        pipe.gather_model()
        found["loss"] = plain_loss(model)
        found["classes"] = {type(module).__module__ for module in model.modules()}
        found["equal"] = all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        with torch.no_grad():
            model.norm.weight.mul_(2)
            model.embed.weight.mul_(0.5)
        losses += run.train(range(2, 4))
        found["stale again"] = said(lambda: model(batch(0)[0]))
        pipe.gather_model(rank=1)
        found["whole"] = tuple(model.embed.weight.shape)
        losses += run.train(range(4, 5))
        found["state"] = cloned(pipe.full_state_dict())
    pipe.gather_model()
    found["after close"] = all(torch.equal(value, found["state"][name]) for name, value in model.state_dict().items())
    found["losses"] = losses
    return found


def gathered_loop(case: Case) -> tuple[list[float], float]:
    """Do the same as ``gathered`` in plain PyTorch; return the losses, and the loss between them."""
    model = case.model()
    optimizer = adam(model.parameters())
    losses, _ = loop(case, range(2), model, optimizer)
    between = plain_loss(model)
    with torch.no_grad():
        model.norm.weight.mul_(2)
        model.embed.weight.mul_(0.5)
    return losses + loop(case, range(2, 5), model, optimizer)[0], between


def loaded_states(group: Any, case: Case, folder: str) -> dict[str, Any]:
    """Load whole state dicts, export weights, and change weights with ``apply``."""
    found: dict[str, Any] = {}
    due = case.model(seed=3).state_dict()
    with made(case, case.model()) as pipe:
        pipe.load_state_dict(due)
        found["loaded"] = all(torch.equal(value, due[name]) for name, value in pipe.full_state_dict().items())
        wrong = due | {"blocks.1.mixed.weight": torch.zeros(8, WIDTH)}
        found["misfit"] = said(lambda: pipe.load_state_dict(wrong))
        found["missing"] = said(lambda: pipe.load_state_dict({name: due[name] for name in list(due)[1:]}))
        pipe.save_weights(folder)
        pipe.apply(doubled)
        found["applied"] = all(
            torch.equal(value, due[name] if name == "head.weight" else 2 * due[name])
            for name, value in pipe.full_state_dict().items()
        )
        found["loss"] = float(pipe.step(*batch(0)[:1], target=batch(0)[1]))
    return found


def doubled(module: nn.Module) -> None:
    """Double the weights of a module, which must be whole."""
    if isinstance(module, nn.Linear) and module.out_features != WORDS:
        assert module.weight.shape == (module.out_features, module.in_features)
    for name, parameter in module.named_parameters(recurse=False):
        if not (isinstance(module, nn.Linear) and module.out_features == WORDS):  # its weight may be tied
            parameter.data.mul_(2)
        assert name in ("weight", "bias")


def exported(group: Any, case: Case, folder: str) -> None:
    with made(case, case.model()) as pipe:
        pipe.load_state_dict(case.model(seed=3).state_dict())
        pipe.save_weights(folder)


def filled(group: Any, case: Case, init: Any) -> tuple[dict[str, Tensor], int]:
    """Return the whole weights of a model that was built without weights, and the bytes that this rank holds."""
    if init == "mapping":
        init = case.model(seed=5).state_dict()
    if init == "function":
        init = drawn
    options = {} if init is None else {"init": init}
    with made(case, case.model, **options) as pipe:
        held = sum(parameter.nbytes for _, parameter in pipe.named_parameters())
        return cloned(pipe.full_state_dict()), held


def memory_of(group: Any, case: Case) -> tuple[int, list[dict[str, int]]]:
    """Return the bytes of the weights that this rank holds, and the predicted memory of all ranks of a pipeline."""
    with made(case, case.model()) as pipe:
        held = sum(parameter.nbytes for _, parameter in pipe.named_parameters())
        predicted = pipe.predicted_memory
        names = ("parameters", "gradients", "optimizer")
        return held, [{name: int(getattr(own, name)) for name in names} for own in predicted]


@torch.no_grad()
def drawn(module: nn.Module) -> None:
    """Fill the weights of a module. The numbers depend on the shapes of whole weights."""
    for parameter in module.parameters(recurse=False):
        parameter.normal_(0, 1 / parameter.numel() ** 0.5)


# ---- gradients ----------------------------------------------------------------------------------------------------


def _filled(value: float, parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.fill_(value)


def poisoned(group: Any, case: Case, on_nonfinite: Any) -> dict[str, Any]:
    """Run a step in which the gradient of one plane's block of one weight becomes NaN, and a step after it."""
    numerics = Numerics(clip_grad_norm=CLIP, on_nonfinite=on_nonfinite)
    run = Run(case, case.model(), numerics=numerics)
    found: dict[str, Any] = {}
    with run.pipe as pipe, warnings.catch_warnings(action="ignore"):
        run.train(range(1))
        before = cloned(pipe.full_state_dict())
        weight = dict(pipe.named_parameters()).get("blocks.1.mixed.weight")
        handle = None
        if weight is not None and mesh_of(case.dims or (1, 1, 1)).get_local_rank("tp") == 1:
            handle = weight.register_post_accumulate_grad_hook(partial(_filled, torch.nan))
        found["error"] = said(lambda: run.train(range(1, 2)))
        if handle is not None:
            handle.remove()
        after = cloned(pipe.full_state_dict())
        found["kept"] = all(torch.equal(value, before[name]) for name, value in after.items())
        if on_nonfinite == "skip":
            found["losses"] = run.train(range(2, 4))
    return found


def overflown(group: Any, case: Case) -> dict[str, Any]:
    """Train with a scaler, and let one plane's gradients overflow in the second step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    own = case.own_optimizer
    numerics = Numerics(scaler=scaler, clip_grad_norm=CLIP if own else None)
    run = Run(case, case.model(), numerics=numerics)
    found: dict[str, Any] = {"scales": [], "kept": []}
    with run.pipe as pipe, warnings.catch_warnings(action="ignore"):
        for step in range(3):
            before = cloned(pipe.full_state_dict())
            weight = dict(pipe.named_parameters()).get("blocks.1.mixed.weight")
            handle = None
            if weight is not None and step == 1 and mesh_of(case.dims or (1, 1, 1)).get_local_rank("tp") == 1:
                handle = weight.register_post_accumulate_grad_hook(partial(_filled, torch.inf))
            x, y = batch(step)
            pipe.step(x, target=y)
            if run.optimizer is not None:
                scaler.step(run.optimizer)
                scaler.update()
                run.optimizer.zero_grad()
            if handle is not None:
                handle.remove()
            found["scales"].append(scaler.get_scale())
            after = cloned(pipe.full_state_dict())
            found["kept"].append(all(torch.equal(value, before[name]) for name, value in after.items()))
    return found


def norms_of(group: Any, case: Case, norm_type: float) -> list[float]:
    """Return the norms of a few steps."""
    run = Run(case, case.model())
    with run.pipe as pipe:
        found = []
        for step in range(2):
            x, y = batch(step)
            pipe.step(x, target=y)
            found.append(float(pipe.clip_grad_norm_(CLIP, norm_type, error_if_nonfinite=True)))
            assert run.optimizer is not None
            run.optimizer.step()
            run.optimizer.zero_grad()
        return found


# ---- refusals -----------------------------------------------------------------------------------------------------


class Odd(torch.optim.AdamW):
    """A subclass, which may do anything."""


def refused(group: Any, case: Case) -> dict[str, str]:
    """Return the errors of optimizers that combine elements of a weight."""
    found = {}
    for kind in (torch.optim.Adafactor, torch.optim.Muon, Odd):
        weights = [] if kind is torch.optim.Muon else None

        def optimizer(parameters: Any, kind: Any = kind, only: Any = weights) -> Any:
            held = list(parameters) if only is None else [own for own in parameters if own.dim() == 2]
            return kind(held, lr=0.01)

        found[kind.__name__] = said(lambda optimizer=optimizer: made(case, case.model(), optimizer=optimizer))
    own = Case(case.dims, own_optimizer=False)
    with made(own, own.model()) as pipe:
        found["given"] = said(lambda: torch.optim.Adafactor(pipe.parameters(), lr=0.01))
        found["clipped"] = said(lambda: torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1.0))
        hidden = torch.optim.Adafactor(list(pipe.parameters()), lr=0.01)
        pipe.step(batch(0)[0], target=batch(0)[1])
        hidden.step()
        found["saved"] = said(lambda: pipe.training_state(optimizer=hidden))
    return found


def _saved(pipe: Pipeline, folder: str, asynchronous: bool) -> None:
    pipe.save(folder, asynchronous=asynchronous)
    pipe._finish_saves()


def faulty_saves(group: Any, case: Case, folder: str) -> dict[str, str]:
    """Return the errors of saves that cannot succeed."""
    found = {}
    mesh = mesh_of(case.dims or (1, 1, 1))
    run = Run(case, case.model())
    with run.pipe as pipe:
        run.train(range(1))
        pipe.save(folder)
        original = writing.write_tensors

        def full(*args: Any) -> Any:
            raise OSError(28, "No space left on device", str(args[0]))

        for asynchronous in (False, True):
            writing.write_tensors = full if mesh.get_local_rank("tp") == 0 else original
            found[f"full {asynchronous}"] = said(lambda at=asynchronous: _saved(pipe, folder, at))
        writing.write_tensors = original
        pipe.save(folder)
        weight = dict(pipe.named_parameters()).get("blocks.1.norm.weight")
        if weight is not None and mesh.get_local_rank("tp") == 1:
            weight.data[3] += 1
        found["differs"] = said(lambda: pipe.save(folder))
        found["states"] = said(lambda: pipe.save(folder, extra={"number": mesh.get_local_rank("tp")}))
    return found


def dying_writer(group: Any, case: Case, folder: str) -> str:
    """Return the error of a save during which the last rank dies before it gives its blocks."""
    mesh = mesh_of(case.dims or (1, 1, 1))
    run = Run(case, case.model())
    run.train(range(1))
    run.pipe.save(folder)
    if mesh.get_rank() == case.num_ranks - 1:
        run.pipe._running.assembly.split.group.gathered = lambda tensor: os._exit(1)  # type: ignore
    return said(lambda: run.pipe.save(folder))


def other_weights(group: Any, case: Case) -> str:
    """Return the error of a pipeline whose planes have different weights."""
    return said(lambda: made(case, case.model(seed=mesh_of(case.dims or (1, 1, 1)).get_local_rank("tp"))))


def averaged(group: Any, case: Case, path: str, other: str) -> dict[str, Tensor]:
    """Train with averages of the weights, or load them, and save them. Return the averages of whole weights."""
    run = Run(case, case.model())
    with run.pipe as pipe, warnings.catch_warnings(action="ignore"):
        average = Average(pipe)
        if path:
            pipe.load(path, extra={"average": average})
        else:
            run.train(range(2))
            average.update(pipe)
        pipe.save(other, extra={"average": average})
        return cloned(average.state)


class Average:
    """Averages of the weights of this rank's stages."""

    def __init__(self, pipe: Pipeline) -> None:
        self.state = {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}

    def update(self, pipe: Pipeline) -> None:
        for name, parameter in pipe.named_parameters():
            self.state[name].lerp_(parameter.detach(), 0.25)

    def state_dict(self) -> dict[str, Any]:
        return {"averages": dict(self.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["averages"].items():
            self.state[name].copy_(value)


def states_passed(group: Any, case: Case, parts: Any) -> Any:
    """Return this rank's training state after two steps, or load such states and return the next losses."""
    run = Run(case, case.model(seed=0 if parts is None else 7))
    with run.pipe as pipe, warnings.catch_warnings(action="ignore"):
        if parts is None:
            run.train(range(2))
            state = pipe.training_state()
            return {**state, "tensors": cloned(state["tensors"])}
        pipe.load_training_state(parts)
        return run.train(range(2, 4))
