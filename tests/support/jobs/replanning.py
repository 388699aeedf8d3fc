"""Jobs that train over processes while the plan changes, and return what a run that never changes must have."""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from pipesched import Costs, Distributed, Numerics, Pipeline, schedules, simulate
from pipesched.errors import PipeschedError
from pipesched.planning.plan import Plan
from tests.support import resumed_runs as runs
from tests.support.places import Group, mesh_of, place
from tests.support.resumed_runs import Half


@cache
def plan_of(half: Half, in_tree: bool = False) -> Plan:
    """Return the plan of one replica, as a pipeline of this kind makes it."""
    num_stages = half.ranks * schedules.get(half.schedule).chunks_per_rank
    layers = ["first", *(f"blocks.{index}" for index in range(runs.BLOCKS)), "last"]
    one = Pipeline(
        untied() if in_tree else runs.Net(),
        runs.batch(0)[0][:3],
        loss_fn=functional.mse_loss,
        schedule=half.schedule,
        devices=["cpu"] * half.ranks,
        num_microbatches=runs.MICROBATCHES // half.replicas,
        boundaries=[layers[len(layers) * stage // num_stages] for stage in range(1, num_stages)],
        checkpoint=half.checkpoint,
    )
    with one:
        return one.plan


def untied() -> nn.Module:
    """Return a model in which no weight is shared, because sums in a tree need that."""
    model = runs.Net()
    model.last.weight = nn.Parameter(model.last.weight.detach().clone())
    return model


def pipeline(group: Group, half: Half, in_tree: bool, replan_every: int | None = None) -> Pipeline:
    """Return a pipeline over all processes of the group that begins with the plan of ``half``."""
    where = place(group)
    if half.replicas > 1:
        where["mesh"] = mesh_of(half.replicas, group.size() // half.replicas)
        where["distributed"] = Distributed(timeout=600, zero=half.zero)
    if replan_every is not None:
        where["distributed"] = Distributed(timeout=600, replan_every=replan_every)
    user = half.optimizer == "user"
    return Pipeline(
        untied() if in_tree else runs.Net(),
        runs.batch(0)[0][:3],
        loss_fn=functional.mse_loss,
        plan=plan_of(half, in_tree),
        optimizer=None if user else runs.adam,
        numerics=Numerics(
            batch_norm="mini-batch" if half.replicas > 1 else "micro-batch",
            clip_grad_norm=None if user else runs.CLIP,
            reduction_order="tree" if in_tree else "sequential",
        ),
        seed=runs.SEED,
        **where,
    )


class Schedulers:
    """One scheduler for each optimizer. An optimizer that is new in the middle of a run gets one in the same state."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def step(self, optimizers: Sequence[Any], step: int) -> None:
        for optimizer in optimizers:
            if optimizer not in self._known:
                rates = [group["lr"] for group in optimizer.param_groups]
                self._known[optimizer] = scheduler = CosineAnnealingLR(optimizer, runs.STEPS)
                scheduler.last_epoch = step
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate
            self._known[optimizer].step()


def trained(
    group: Group, halves: Sequence[Half], in_tree: bool = False
) -> tuple[list[Tensor], dict[str, Tensor], list[int]]:
    """Train under each plan in turn; return the losses, this process's tensors, and the bytes sent by each change."""
    first = half = halves[0]
    with pipeline(group, first, in_tree) as pipe:
        own = [runs.adam(pipe.parameters())] if first.optimizer == "user" else []
        states = {"optimizer": own[0]} if own else {}
        schedulers = Schedulers()
        losses, moved = [], []
        length = -(-runs.STEPS // len(halves))
        for step in range(runs.STEPS):
            if step and step % length == 0:
                half = halves[step // length]
                moved.append(pipe.replan(plan_of(half, in_tree), num_replicas=half.replicas, **states).moved_bytes)
            replica = group.rank() * half.replicas // group.size()
            x, y = (rows.chunk(half.replicas)[replica] for rows in runs.batch(step))
            losses.append(pipe.step(x, target=y).clone())
            if own:
                pipe.clip_grad_norm_(runs.CLIP)
                own[0].step()
                own[0].zero_grad()
            schedulers.step(own or list(pipe.optimizers.values()), step)
        return losses, tensors_of(pipe, own or list(pipe.optimizers.values())), moved


def tensors_of(pipe: Pipeline, optimizers: list[Any]) -> dict[str, Tensor]:
    """Return this process's weights, buffers and optimizer states. Divided states have the index of their first row."""
    names: dict[Any, str] = {parameter: name for name, parameter in pipe.named_parameters()}
    weights = pipe.full_state_dict()
    tensors = {**{name: weights[name] for name in names.values()}, **dict(pipe.named_buffers())}
    rows: dict[Any, int] = {}
    for update in pipe._running.assembly.divided_updates.values():
        for parameter, local in update.local.items():
            names[local] = names[parameter]
            if (own := update.own_rows(parameter)) is not None:
                rows[local] = own[0]
    tensors |= dict(runs.named_states(optimizers, names, rows))
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def as_if(pipe: Pipeline, slow: Mapping[int, float]) -> None:
    """Let the last steps of a pipeline look as if each layer took 3 ms, and longer in processes that are slow."""
    running, cost_model = pipe._running, pipe._cost_model
    if not cost_model.slow:
        times = dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s"), 1e-3)
        known = cost_model.measured()
        cost_model.forget()
        cost_model.layers = {name: replace(own, backward_s=2e-3, crowded_s=0.0, **times) for name, own in known.items()}
    program = running.program
    factors = [slow.get(running.host.grid.rows[0][rank], 1.0) for rank in program.placement]
    times = [1e-3 * len(names) * factor for names, factor in zip(running.cut, factors, strict=True)]
    costs = Costs(forward_s=times, input_grad_s=times, weight_grad_s=times)
    step = simulate(program, costs)
    ranks = running.host.grid.rows[0]
    known = {rank: pipe._cost_model.slowness(rank) for rank in ranks}
    strays = [rank for rank in ranks if slow.get(rank, 1.0) > 1.5 * known[rank]]
    probed = {rank: slow.get(rank, 1.0) for rank in (*ranks[program.num_ranks :], *strays)}
    pipe._history.gather_steps = lambda: ([step] * 4, probed)


def with_slow_processes(group: Group, slow: Mapping[int, float]) -> list[Any]:
    """Train while processes become slow; return the layers of each process and the losses."""
    half = Half(4, optimizer="pipeline")
    losses, placed, schedulers = [], [], Schedulers()
    with pipeline(group, half, in_tree=False) as pipe:
        for step in range(6):
            x, y = runs.batch(step)
            losses.append(pipe.step(x, target=y).clone())
            schedulers.step(list(pipe.optimizers.values()), step)
            if step in (1, 3):
                as_if(pipe, slow if step == 1 else {})
                found = pipe.replan()
                assert found.moved or (step == 3 and found.saving_s < 0.03 * found.before_s), found
                ranks = pipe._running.host.grid.rows[0]
                held = dict.fromkeys(range(group.size()), 0)
                for rank, names in zip(pipe.plan.program.placement, pipe.plan.stages, strict=True):
                    held[ranks[rank]] += len(names)
                placed.append((held, pipe._cost_model.slow))
    return [losses, placed]


def unasked(group: Group) -> list[Any]:
    """Train with a pipeline that looks for a faster plan after every 2 steps; return losses, plans and messages."""
    losses, plans, schedulers = [], [], Schedulers()
    with listening() as said, pipeline(group, Half(3, optimizer="pipeline"), False, replan_every=2) as pipe:
        for step in range(11):
            as_if(pipe, {1: 4.0} if step in (2, 3) else {})
            x, y = runs.batch(step)
            losses.append(pipe.step(x, target=y).clone())
            schedulers.step(list(pipe.optimizers.values()), step)
            plans.append((pipe.plan.program.num_ranks, pipe.plan.stages, pipe._running.host.grid.rows))
    return [losses, plans, said]


@contextmanager
def listening() -> Iterator[list[str]]:
    """A context that collects what pipelines log at the level INFO."""
    said: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("pipesched.pipeline")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield said
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)


def idle_speed(group: Group) -> dict[Any, float]:
    """Return the measured slowness of the processes without stages."""
    with pipeline(group, Half(2, optimizer="pipeline"), False) as pipe:
        if pipe._running.assembly.stages:
            pipe._history._strays = lambda _: 1.0  # as expected, whatever else the machine does
        pipe._cost_model.measured()
        x, y = runs.batch(0)
        for _ in range(3):
            pipe.step(x, target=y)
        return pipe._history.gather_steps()[1]


def two_groups(pipe: Pipeline) -> Adam:
    """Return an optimizer of two groups with the same settings."""
    matrices = [parameter for parameter in pipe.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in pipe.parameters() if parameter.dim() == 1]
    return Adam([{"params": matrices}, {"params": others}], lr=0.02)


def changed(pipe: Pipeline, what: str) -> None:
    """Change flags of this process's own parameters or modules, as user code does in the middle of a run."""
    if what == "unfrozen":
        for parameter in pipe.parameters():
            parameter.requires_grad_(True)
    if what == "frozen norms":
        for module in pipe.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()


class Average:
    """An average of the weights of this process's stages."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self.weights = {name: weight.detach().clone() for name, weight in pipe.named_parameters()}

    def update(self) -> None:
        for name, weight in self._pipe.named_parameters():
            self.weights[name].lerp_(weight.detach(), 0.1)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.weights)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.weights = {name: weight.clone() for name, weight in state.items()}


def with_user_changes(group: Group, what: str, replans: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train with changes by user code, under one plan or several; return the losses and this process's tensors."""
    halves = [Half(4), Half(2, "zb-v"), Half(3)]
    with pipeline(group, halves[0], in_tree=False) as pipe:
        if what == "unfrozen":
            pipe.model.blocks[3].requires_grad_(False)
            pipe.model.blocks[6].requires_grad_(False)
        optimizer = two_groups(pipe)
        average = Average(pipe)
        scheduler = LambdaLR(optimizer, [lambda _: 1.0, lambda step: 1.0 if step < 4 else 0.1])
        losses = []
        for step in range(8):
            if step == 2:
                changed(pipe, what)
            if replans and step in (3, 5):
                states = {"optimizer": optimizer, "scheduler": scheduler, "extra": {"average": average}}
                pipe.replan(plan_of(halves[step // 2]), **states)
            x, y = runs.batch(step)
            losses.append(pipe.step(x, target=y).clone())
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            average.update()
        averages = {f"{name}: average": weight for name, weight in average.weights.items()}
        return losses, {**tensors_of(pipe, [optimizer]), **averages}


def refused_with_idle_ranks(group: Group) -> list[str]:
    """Return what replans to a plan with an idle rank say, in a pipeline whose ranks must all check for overflows."""
    with Pipeline(
        runs.Net(),
        runs.batch(0)[0][:3],
        loss_fn=functional.mse_loss,
        plan=plan_of(Half(2)),
        optimizer=runs.adam,
        numerics=Numerics(on_nonfinite="skip"),
        **place(group),
    ) as pipe:
        said = []
        for choices in ({"plan": plan_of(Half(1))}, {"num_replicas": 2}, {"plan": pipe.plan, "num_replicas": 0}):
            try:
                pipe.replan(**choices)
            except PipeschedError as error:
                said.append(str(error))
        x, y = runs.batch(0)
        pipe.step(x, target=y)
        return said


def said_about_arguments(group: Group) -> list[str]:
    """Return what replans say if rank 1 passes other arguments than rank 0, or all ranks pass wrong ones."""
    other = nn.Sequential(nn.Linear(runs.WIDTH, runs.WIDTH), nn.Linear(runs.WIDTH, runs.WIDTH))
    one = Pipeline(other, runs.batch(0)[0], loss_fn=functional.mse_loss, devices=["cpu"] * 2, schedule="1f1b")
    with pipeline(group, Half(2), in_tree=False) as pipe, one:
        optimizer = runs.adam(pipe.parameters())
        due, foreign = plan_of(Half(1)), one.plan
        choices = [
            {"plan": (due, foreign)[group.rank()]},
            {"plan": (due, None)[group.rank()]},
            {"plan": due, "optimizer": (optimizer, None)[group.rank()]},
            {"plan": foreign},
            {"plan": due, "optimizer": optimizer, "extra": {"epoch": 3}},
        ]
        said = []
        for choice in choices:
            x, y = runs.batch(0)
            pipe.step(x, target=y)
            try:
                pipe.replan(**choice)
            except PipeschedError as error:
                said.append(f"{type(error).__name__}: {error}")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            pipe.replan(due)
        assert [group.rank() == 0] * 35 == [weight.grad is not None for weight in pipe.model.parameters()]
        return [*said, *(str(warning.message) for warning in warned)]
