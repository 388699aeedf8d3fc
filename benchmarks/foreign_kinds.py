"""The kinds of user code that `foreign` draws: each variant adds its code to a case."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import foreign_layers as layers
import numpy as np
import torch
from foreign_case import WIDTH, Batch, Block, Case, Net, PipelineRun, Run, cut, plain_step
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from pipesched import Distributed, Numerics

__all__ = ["KINDS", "Variant", "draw_case", "variants"]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way in which users write a kind of code."""

    kind: str
    name: str
    issue: str  #: the part of the issues that describes the kind
    add: Callable[[Case], None]
    takes: frozenset[str]  #: what at most one variant of a case may change
    where: str  #: "anywhere", "process" (one process only) or "mesh"
    share: float  #: how often it is drawn among the variants of its kind


KINDS: dict[str, list[Variant]] = {}


def variants() -> list[Variant]:
    """Return all variants."""
    return [variant for own in KINDS.values() for variant in own]


def _of(
    kind: str, issue: str, *takes: str, where: str = "anywhere", share: float = 1.0
) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    def register(add: Callable[[Case], None]) -> Callable[[Case], None]:
        name = add.__name__.strip("_").replace("_", " ")
        own = Variant(kind=kind, name=name, issue=issue, add=add, takes=frozenset([*takes]), where=where, share=share)
        KINDS.setdefault(kind, []).append(own)
        return add

    return register


# ---- drawing a case ------------------------------------------------------------------------------------------------

#: Schedule -> stages per rank.
SCHEDULES = {"1f1b": 1, "gpipe": 1, "zb-h1": 1, "eager-1f1b": 1, "interleaved-1f1b": 2, "zb-v": 2, "looped-bfs": 2}
TWO_WAY = ["chimera", "dualpipe"]


def draw_case(seed: int, only: str | None = None) -> Case:
    """Return the case of a seed. Three of five cases combine several kinds.

    Args:
        seed: the number of the case.
        only: the one "kind: variant" of the case. Default: one to three random ones.

    """
    draw = random.Random(seed)
    case = Case(seed=seed, draw=draw, rows=draw.choice([8, 8, 7, 10]), num_microbatches=draw.choice([2, 4, 4]))
    case.layers = [Block] * draw.randint(4, 6)
    wanted = draw.choice([1, 1, 2, 2, 3]) if only is None else 1
    chosen: list[Variant] = [one for one in variants() if f"{one.kind}: {one.name}" == only]
    for _ in range(20):
        if len(chosen) == wanted:
            break
        own = KINDS[draw.choice(list(KINDS))]
        variant = draw.choices(own, [one.share for one in own])[0]
        others = [one.kind for one in chosen]
        used = {one for known in chosen for one in known.takes}
        places = {one.where for one in (*chosen, variant)} - {"anywhere"}
        if variant.kind not in others and not used & variant.takes and len(places) < 2:
            chosen.append(variant)
    places = {one.where for one in chosen} - {"anywhere"}
    where = places.pop() if places else draw.choice(["process"] * 4 + ["mesh"])
    case.world = 2 if where == "mesh" else 1
    taken = {one for known in chosen for one in known.takes}
    if "schedule" not in taken:
        _draw_schedule(case)
    for variant in sorted(chosen, key=lambda one: ("schedule" not in one.takes, one.kind)):
        variant.add(case)
        case.kinds.append(f"{variant.kind}: {variant.name}")
    if "recompute" not in taken and draw.random() < 0.3:
        word = draw.choice(["recompute", "recompute-cheap", "offload"])
        case.options["checkpoint"] = {f"layers.{case.plain_layer()}": word}
    if "boundaries" not in case.options:
        _draw_boundaries(case)
    return case


def _draw_schedule(case: Case) -> None:
    name = case.draw.choice(list(SCHEDULES))
    case.options["schedule"] = name
    case.num_ranks = 2 if SCHEDULES[name] > 1 or case.world > 1 else case.draw.choice([2, 2, 3])
    if SCHEDULES[name] > 1:
        case.num_microbatches = 4


def _draw_boundaries(case: Case) -> None:
    stages = case.num_ranks * SCHEDULES.get(case.options["schedule"], 1)
    inside = {index for first, last in case.regions.items() for index in range(first + 1, last + 1)} | case.joined
    starts = [index for index in range(1, len(case.layers)) if index not in inside]
    if len(starts) >= stages - 1:
        chosen = sorted(case.draw.sample(starts, stages - 1))
        case.options["boundaries"] = [f"layers.{index}" for index in chosen]


# ---- Silent 1.1 ----------------------------------------------------------------------------------------------------


@_of("derivatives", "Silent 1.1", "call", "loss", where="process", share=2)
def _backward_of_the_output(case: Case) -> None:
    def call(run: Run, batch: Batch) -> None:
        loss = run.loss_fn(run.outputs(batch.inputs), batch.target)
        loss.backward()
        run.seen.append(loss.detach())

    case.call = call
    case.close.append("the loss of all rows in one call")


@_of("derivatives", "Silent 1.1", "call", "loss", where="process", share=0.15)
def _gradient_penalty(case: Case) -> None:
    def call(run: Run, batch: Batch) -> None:
        moved = {**batch.inputs, "x": (0.5 * batch.inputs["x"]).requires_grad_()}
        (slope,) = torch.autograd.grad(run.outputs(moved).sum(), moved["x"], create_graph=True)
        loss = functional.mse_loss(run.outputs(batch.inputs), batch.target) + slope.square().mean()
        loss.backward()
        run.seen.append(loss.detach())

    case.call = call
    case.close.append("the loss of all rows in one call")


@_of("derivatives", "Silent 1.1", "call", "loss", where="process")
def _gradient_of_the_input(case: Case) -> None:
    def call(run: Run, batch: Batch) -> None:
        point = batch.inputs["x"].requires_grad_()
        (slope,) = torch.autograd.grad(run.outputs(batch.inputs).square().sum(), point)
        run.seen.append(slope)

    case.call = call
    case.close.append("the loss of all rows in one call")


# ---- Silent 1.2 ----------------------------------------------------------------------------------------------------


@_of("what losses read", "Silent 1.2", "loss", share=0.12)
def _all_weights(case: Case) -> None:
    case.loss = lambda net: (
        lambda output, target: (
            functional.mse_loss(output, target) + 0.1 * sum(p.square().sum() for p in net.parameters())
        )
    )
    case.close.append("the loss reads weights")


@_of("what losses read", "Silent 1.2", "loss", share=0.15)
def _a_feature_of_a_hook(case: Case) -> None:
    index = case.draw.randrange(len(case.layers) - 1)

    def loss(net: Net) -> Any:
        kept: dict[str, Tensor] = {}
        net.layers[index].register_forward_hook(lambda module, args, output: kept.update(feature=output))
        return lambda output, target: functional.mse_loss(output, target) + 0.5 * kept["feature"].square().mean()

    case.loss = loss


@_of("what losses read", "Silent 1.2", "loss", share=0.12)
def _the_gradient_of_the_input(case: Case) -> None:
    given: dict[str, Tensor] = {}

    def call(run: Run, batch: Batch) -> None:
        given["x"] = batch.inputs["x"].requires_grad_()
        run.seen.append(run.step(batch))

    def loss(net: Net) -> Any:
        def compute(output: Tensor, target: Tensor) -> Tensor:
            (slope,) = torch.autograd.grad(output.sum(), given["x"], create_graph=True)
            return functional.mse_loss(output, target) + slope.square().mean()

        return compute

    case.call, case.loss = call, loss
    case.num_microbatches = 1
    case.options["schedule"], case.num_ranks = "gpipe", 2
    case.close.append("the gradient of all rows")


@_of("what losses read", "Silent 1.2", "loss", share=2)
def _weights_of_classes(case: Case) -> None:
    weight = torch.linspace(0.5, 2.0, WIDTH)
    case.loss = lambda net: lambda output, target: functional.cross_entropy(output, target, weight)
    case.make_target = lambda generator, rows: torch.randint(WIDTH, (rows,), generator=generator)
    case.weigh = lambda part: float(weight[part.target].sum())
    case.close.append("the sum of the classes' weights")


def _keep_a_feature(case: Case) -> None:
    """Keep the output of a layer as ``extras["feature"]``."""
    index = case.draw.randrange(len(case.layers) - 1)

    def between(net: Net, at: int, x: Any, extras: dict[str, Any]) -> Any:
        if at >= index:  # some code is not called between layers that are checkpointed together
            extras.setdefault("feature", x)
        return x

    case.between.append(between)


@_of("what losses read", "Silent 1.2", "loss", "finish", share=2)
def _a_returned_feature(case: Case) -> None:
    _keep_a_feature(case)
    case.finish = lambda net, at, x, extras: (x, extras["feature"])
    case.loss = lambda net: (
        lambda output, target: functional.mse_loss(output[0], target) + 0.5 * functional.l1_loss(output[1], target)
    )


# ---- Silent 1.3 ----------------------------------------------------------------------------------------------------


class _OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.SmoothL1Loss()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.inner(output, target)

    def method(self, output: Tensor, target: Tensor) -> Tensor:
        return 2 * (output - target).abs().mean() + self.inner(output, target)


_MEANS: dict[str, Callable[[], Any]] = {
    "lambda": lambda: lambda output, target: functional.mse_loss(output.float(), target),
    "partial": lambda: partial(functional.smooth_l1_loss, beta=0.5),
    "module": _OwnLoss,
    "method": lambda: _OwnLoss().method,
    "own mean": lambda: lambda output, target: (output - target).square().mean(),
    "mean of rows": lambda: lambda output, target: (output - target).square().sum(1).mean(),
    "two terms": lambda: (
        lambda output, target: functional.mse_loss(output, target) + 0.1 * functional.l1_loss(output, target)
    ),
}


@_of("forms of losses", "Silent 1.3", "loss", share=2)
def _a_mean(case: Case) -> None:
    make = _MEANS[case.draw.choice(list(_MEANS))]
    case.loss = lambda net: make()


@_of("forms of losses", "Silent 1.3", "loss")
def _a_sum(case: Case) -> None:
    case.averages = False
    own = case.draw.random() < 0.5
    case.loss = lambda net: (
        lambda output, target: (
            (output - target).square().sum() if own else functional.mse_loss(output, target, reduction="sum")
        )
    )


@_of("forms of losses", "Silent 1.3", "loss")
def _ignored_targets(case: Case) -> None:
    def make_target(generator: torch.Generator, rows: int) -> Tensor:
        target = torch.randint(WIDTH, (rows,), generator=generator)
        target[1::2][torch.rand(rows // 2, generator=generator) < 0.6] = -100
        return target

    stated = case.draw.random() < 0.5
    case.loss = lambda net: lambda output, target: functional.cross_entropy(output.float(), target)
    case.make_target = make_target
    case.weigh = lambda part: float((part.target != -100).sum())
    if stated:
        case.options["numerics"] = Numerics(loss_weight=lambda target: float((target != -100).sum()))
    case.close.append("numbers of targets as weights")


@_of("forms of losses", "Silent 1.3", "loss", share=0.15)
def _a_sum_divided_by_its_length(case: Case) -> None:
    case.loss = lambda net: lambda output, target: (output - target).square().sum() / len(output)


@_of("forms of losses", "Silent 1.3", "loss")
def _a_stated_reduction(case: Case) -> None:
    case.loss = lambda net: lambda output, target: (output - target).square().sum() / len(output)
    case.options["numerics"] = Numerics(loss_reduction="mean")


# ---- Silent 1.4 ----------------------------------------------------------------------------------------------------


@_of("weights changed by code", "Silent 1.4", "between", share=0.12)
def _a_momentum_encoder_in_forward(case: Case) -> None:
    first, second = sorted(case.draw.sample(range(len(case.layers)), 2))

    def between(net: Net, at: int, x: Tensor, extras: dict[str, Any]) -> Tensor:
        if at == -1:
            with torch.no_grad():
                for slow, fast in zip(net.layers[second].parameters(), net.layers[first].parameters(), strict=False):
                    if slow.shape == fast.shape:
                        slow.lerp_(fast, 0.5)
        return x

    case.between.append(between)
    case.close.append("weights of the step and of its micro-batches")


@_of("weights changed by code", "Silent 1.4", share=2, where="process")
def _an_average_after_the_step(case: Case) -> None:
    def after(run: Run) -> None:
        kept = run.__dict__.setdefault("average", [p.detach().clone() for p in run.net.parameters()])
        for mean, parameter in zip(kept, run.net.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.5)
        run.seen.extend(mean.clone() for mean in kept)

    case.after_step.append(after)


@_of("weights changed by code", "Silent 1.4", share=2)
def _weights_clamped_before_the_step(case: Case) -> None:
    def before(run: Run) -> None:
        with torch.no_grad():
            for parameter in run.parameters():
                parameter.clamp_(-0.3, 0.3)

    case.before_step.append(before)


# ---- Silent 1.5 ----------------------------------------------------------------------------------------------------


@_of("attributes of layers", "Silent 1.5", "between", share=2)
def _a_gain_of_another_layer(case: Case) -> None:
    index = case.place(layers.HasGain)
    every = case.draw.random() < 0.5

    def between(net: Net, at: int, x: Tensor, extras: dict[str, Any]) -> Tensor:
        return x * net.layers[index].gain if every or at == len(net.layers) - 1 else x  # type: ignore[operator]

    def before(run: Run) -> None:
        run.net.layers[index].gain = 1.0 + run.step_number  # type: ignore[assignment]

    case.between.append(between)
    case.before_step.append(before)


@_of("attributes of layers", "Silent 1.5", "between", share=2)
def _a_frozen_layer(case: Case) -> None:
    index = case.draw.randrange(len(case.layers))

    def between(net: Net, at: int, x: Tensor, extras: dict[str, Any]) -> Tensor:
        return x * 2 if at >= 0 and net.layers[index].training else x

    case.between.append(between)
    case.once_made.append(lambda run: run.net.layers[index].eval() and None)


@_of("attributes of layers", "Silent 1.5", "between")
def _a_list_of_a_layer(case: Case) -> None:
    index = case.place(layers.HasGain)

    def make(run: Run) -> None:
        run.net.layers[index].gain = [1.0, 2.0]  # type: ignore[assignment]

    def between(net: Net, at: int, x: Tensor, extras: dict[str, Any]) -> Tensor:
        gain: Any = net.layers[index].gain
        return x * (gain[-1] if isinstance(gain, list) else gain) if at == len(net.layers) - 1 else x

    case.between.append(between)
    case.once_made.append(make)


# ---- Silent 1.6 ----------------------------------------------------------------------------------------------------


@_of("attributes of weights", "Silent 1.6", "tie")
def _a_tied_weight(case: Case) -> None:
    first, second = case.place(layers.Shared), case.place(layers.Shared)

    def tie(net: Net) -> None:
        weight: Any = net.layers[first].weight
        net.layers[second].weight = weight
        weight.multiplier = 2.0

    case.ties = tie
    case.close.append("gradients of a tied weight, summed use by use")


@_of("attributes of weights", "Silent 1.6", "tie")
def _a_multiplier(case: Case) -> None:
    index = case.place(layers.Shared)

    def tie(net: Net) -> None:
        net.layers[index].weight.multiplier = 2.0  # type: ignore[union-attr]

    def before(run: Run) -> None:
        run.net.layers[index].weight.multiplier = 2.0 + run.step_number  # type: ignore[union-attr]

    case.ties = tie
    case.before_step.append(before)


@_of("attributes of weights", "Silent 1.6", "tie", "recompute")
def _a_multiplier_while_layers_are_measured(case: Case) -> None:
    _a_multiplier(case)
    case.options["boundaries"] = None


# ---- Silent 1.7 ----------------------------------------------------------------------------------------------------


@contextmanager
def _strength(value: float) -> Iterator[None]:
    token = layers.STRENGTH.set(value)
    try:
        yield
    finally:
        layers.STRENGTH.reset(token)


class _Doubled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func in (torch.tanh, Tensor.tanh) else result


@_of("context of the caller", "Silent 1.7", share=2)
def _a_context_variable(case: Case) -> None:
    case.place(layers.ReadsContext)
    case.around.append(lambda: _strength(2.0))


@_of("context of the caller", "Silent 1.7", share=1)
def _a_default_device(case: Case) -> None:
    case.place(layers.ReadsContext)
    case.around.append(lambda: torch.device("meta"))


@_of("context of the caller", "Silent 1.7", "mode", share=0.12, where="process")
def _a_function_mode(case: Case) -> None:
    case.around.append(_Doubled)


@_of("context of the caller", "Silent 1.7", "mode", share=0.12, where="process")
def _hooks_on_saved_tensors(case: Case) -> None:
    case.around.append(lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x * 1.5))


@_of("context of the caller", "Silent 1.7", "call", "mode", share=0.12, where="process")
def _a_counter_of_operations(case: Case) -> None:
    def call(run: Run, batch: Batch) -> None:
        with FlopCounterMode(display=False) as counter:
            run.step(batch)
        run.seen.append(counter.get_total_flops())

    case.call = call


@_of("context of the caller", "Silent 1.7", "mode", share=2)
def _autocast(case: Case) -> None:
    case.around.append(lambda: torch.autocast("cpu", torch.bfloat16))
    case.rounding = 3e-2
    case.close.append("sums in bfloat16")


# ---- Silent 1.8 ----------------------------------------------------------------------------------------------------


@_of("values beside the tensors", "Silent 1.8", "finish", share=0.5)
def _an_attribute_of_a_tensor(case: Case) -> None:
    pairs = zip(case.layers, case.layers[1:], strict=False)
    index = case.draw.choice([index for index, pair in enumerate(pairs) if pair == (Block, Block)])
    case.layers[index], case.layers[index + 1] = layers.Marks, layers.ReadsMark
    if case.draw.random() < 0.8:
        case.joined = {index + 1}


@_of("values beside the tensors", "Silent 1.8", "sample")
def _a_layer_that_may_pass_its_input(case: Case) -> None:
    def repeated(value: Any) -> Any:
        return (
            value * 40
            if isinstance(value, list)
            else np.tile(value, 40)
            if isinstance(value, np.ndarray)
            else (value.repeat(40, *[1] * (value.dim() - 1)))
        )

    case.place(layers.MayPass)
    case.sample = lambda inputs: {name: repeated(value) for name, value in inputs.items()}


@_of("values beside the tensors", "Silent 1.8", "loss", "random")
def _a_loss_that_draws(case: Case) -> None:
    case.draws_random = True
    case.loss = lambda net: lambda output, target: functional.mse_loss(functional.dropout(output, 0.5), target)


@_of("values beside the tensors", "Silent 1.8", "state", share=2)
def _a_value_kept_for_the_next_call(case: Case) -> None:
    case.place(case.draw.choice([layers.KeepsLast, layers.CountsCalls]))


# ---- Silent 1.9 ----------------------------------------------------------------------------------------------------


@_of("around a step", "Silent 1.9", "call", "state", where="process")
def _a_step_that_fails(case: Case) -> None:
    case.place(layers.Normed)
    case.layers[-1] = layers.MayFail

    def call(run: Run, batch: Batch) -> None:
        if isinstance(run, PipelineRun):  # the plain run shows the result without the failed step
            bad = batch.inputs["x"].clone()
            bad[-1] = float("nan")
            with suppress(ValueError):
                run.step(Batch(inputs={**batch.inputs, "x": bad}, target=batch.target))
            for parameter in run.net.parameters():
                parameter.grad = None
        run.seen.append(run.step(batch))

    case.call = call


@_of("around a step", "Silent 1.9", "call", "ranks", where="mesh", share=0.12)
def _a_norm_over_all_gradients(case: Case) -> None:
    def call(run: Run, batch: Batch) -> None:
        run.step(batch)
        run.seen.append(nn.utils.clip_grad_norm_(run.parameters(), 0.1).item())

    case.call = call


@_of("around a step", "Silent 1.9", "call", share=2)
def _a_norm_of_the_pipeline(case: Case) -> None:
    def call(run: Run, batch: Batch) -> None:
        run.step(batch)
        pipe = getattr(run, "pipe", None)
        norm = nn.utils.clip_grad_norm_(run.parameters(), 0.1) if pipe is None else pipe.clip_grad_norm_(0.1)
        run.seen.append(norm.detach().clone())

    case.call = call
    case.close.append("a norm of all gradients")


@_of("around a step", "Silent 1.9", where="mesh", share=0.12)
def _averages_of_all_weights(case: Case) -> None:
    def after(run: Run) -> None:
        kept = run.__dict__.setdefault("average", AveragedModel(run.net))
        kept.update_parameters(run.net)
        run.seen.extend(mean.clone() for mean in kept.module.parameters())

    case.after_step.append(after)


# ---- Silent 2 ------------------------------------------------------------------------------------------------------


def _recompute(case: Case, index: int, *words: str) -> None:
    """Recompute a layer, as a whole, in one of these ways."""
    word = case.draw.choice(words or ("recompute", "recompute-cheap"))
    case.options["checkpoint"] = word if word in ("always", "except_last") else {f"layers.{index}": word}
    case.options["whole_layers"] = [f"layers.{index}"]


def _region(case: Case) -> int:
    first = case.draw.randrange(len(case.layers) - 1)
    case.regions = {first: first + 1}
    case.layers += [Block] * 2  # so that there are enough layers for all stages
    return first


@_of("checkpointing of the model's own", "Silent 2.1", "region", "recompute", share=2)
def _around_layers(case: Case) -> None:
    first = _region(case)
    outside = [index for index in range(len(case.layers)) if index not in (first, first + 1)]
    _recompute(case, case.draw.choice(outside))


@_of("checkpointing of the model's own", "Silent 2.1", "region", "recompute", share=0.1)
def _around_a_recomputed_layer(case: Case) -> None:
    first = _region(case)
    _recompute(case, first + case.draw.randint(0, 1))


@_of("checkpointing of the model's own", "Silent 2.1", "recompute")
def _inside_a_layer(case: Case) -> None:
    _recompute(case, case.place(layers.ChecksItself))


@_of("recomputation", "Silent 2.2", "recompute", share=3)
def _of_any_layer(case: Case) -> None:
    kinds = [layers.OwnFunction, layers.InPlace, Block]
    if case.call is plain_step:
        kinds.append(layers.Dropped)
    if case.options["schedule"] not in TWO_WAY:
        kinds += [layers.Normed, layers.RunningMax]
    kind = case.draw.choice(kinds)
    case.draws_random = case.draws_random or kind is layers.Dropped
    cheap = [] if kind is layers.InPlace else ["recompute-cheap"]
    _recompute(case, case.place(kind), "recompute", "offload", "always", "except_last", *cheap)


@_of("recomputation", "Silent 2.2", "recompute", share=0.2)
def _of_a_recurrent_layer(case: Case) -> None:
    _recompute(case, case.place(layers.Recurrent), "recompute", "recompute-cheap", "always")


@_of("recomputation", "Silent 2.2", "recompute", share=0.15)
def _of_a_layer_that_works_in_place(case: Case) -> None:
    _recompute(case, case.place(case.draw.choice([layers.InPlace, layers.InPlaceAct, layers.InnerGradient])))


@_of("recomputation", "Silent 2.2", "recompute", "random", share=0.12)
def _of_a_random_activation(case: Case) -> None:
    case.draws_random = True
    _recompute(case, case.place(layers.Noisy), "recompute", "recompute-cheap", "always")


@_of("recomputation", "Silent 2.2", "recompute", "state", share=0.12)
def _of_a_layer_with_state(case: Case) -> None:
    kind = case.draw.choice([layers.OwnGenerator, layers.CountsCalls, layers.KeepsLast])
    _recompute(case, case.place(kind), "recompute", "recompute-cheap", "always")


# ---- Silent 3 ------------------------------------------------------------------------------------------------------


@_of("batches of ranks", "Silent 3.1", "ranks", where="mesh", share=0.07)
def _own_batches(case: Case) -> None:
    case.other_batches = True


@_of("batches of ranks", "Silent 3.1", "ranks", where="mesh")
def _the_same_batches(case: Case) -> None:
    case.other_batches = False


@_of("batches of ranks", "Silent 3.1", "ranks", where="mesh")
def _batches_of_the_first_rank(case: Case) -> None:
    case.inputs_of_first = True
    case.options["distributed"] = Distributed(inputs="first")


@_of("weights of ranks", "Silent 3.2", "ranks", where="mesh", share=0.07)
def _own_seeds(case: Case) -> None:
    case.seed_of_rank = lambda rank: rank


@_of("weights of ranks", "Silent 3.2", "ranks", where="mesh")
def _the_same_seed(case: Case) -> None:
    case.seed_of_rank = lambda rank: 3


@_of("weights of ranks", "Silent 3.2", "ranks", where="mesh", share=0.07)
def _a_weight_loaded_on_one_rank(case: Case) -> None:
    class Loaded(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            with torch.no_grad():
                self.weight[0, 0] += torch.distributed.get_rank()

    case.place(Loaded)


@_of("pipelines of ranks", "Silent 3.3", "ranks", where="mesh", share=0.08)
def _devices_in_each_process(case: Case) -> None:
    case.alone = True


@_of("pipelines of ranks", "Silent 3.3", "ranks", where="mesh")
def _an_optimizer_made_before(case: Case) -> None:
    case.early_optimizer = True


@_of("two-way schedules", "Silent 3.4", "schedule", share=0.07)
def _with_a_buffer_that_changes(case: Case) -> None:
    _two_way(case)
    case.place(layers.RunningMax)


@_of("two-way schedules", "Silent 3.4", "schedule", share=0.07)
def _with_batch_norm(case: Case) -> None:
    _two_way(case)
    case.place(layers.Normed)


@_of("two-way schedules", "Silent 3.4", "schedule", share=2)
def _without_buffers(case: Case) -> None:
    _two_way(case)


def _two_way(case: Case) -> None:
    case.options["schedule"] = case.draw.choice(TWO_WAY)
    case.num_microbatches = 4
    case.close.append("gradients of two copies of the weights, added at the end")


# ---- Current 2 -----------------------------------------------------------------------------------------------------


class _Labels(NamedTuple):
    values: Tensor


@dataclass
class _Target:
    values: Tensor


def _scaled_rows(case: Case, make: Callable[[torch.Generator, int], Any]) -> None:
    case.inputs.append(lambda generator, rows, number: {"scales": make(generator, rows)})

    def between(net: Net, at: int, x: Tensor, extras: dict[str, Any]) -> Tensor:
        if at != 0:
            return x
        return torch.stack([row * float(scale) for row, scale in zip(x, extras["scales"], strict=False)])

    case.between.append(between)


@_of("rows", "Current 2", "between")
def _numbers_in_a_list(case: Case) -> None:
    _scaled_rows(case, lambda generator, rows: torch.rand(rows, generator=generator).tolist())


@_of("rows", "Current 2", "between")
def _numbers_in_an_array(case: Case) -> None:
    _scaled_rows(case, lambda generator, rows: np.array(torch.rand(rows, generator=generator).tolist()))


@_of("rows", "Current 2", "between")
def _tensors_in_a_list(case: Case) -> None:
    case.inputs.append(
        lambda generator, rows, number: {"images": list(torch.rand(rows, 3, WIDTH, generator=generator))}
    )

    def between(net: Net, at: int, x: Tensor, extras: dict[str, Any]) -> Tensor:
        return x + torch.stack([one.mean(0) for one in extras["images"]]) if at == 0 else x

    case.between.append(between)


@_of("rows", "Current 2", "loss", "target")
def _a_target_in_an_object(case: Case) -> None:
    kind = case.draw.choice([_Labels, _Target])
    case.make_target = lambda generator, rows: kind(torch.randn(rows, WIDTH, generator=generator))
    case.loss = lambda net: lambda output, target: functional.mse_loss(output, target.values)


@_of("rows", "Current 2", "loss", "target")
def _targets_in_a_list(case: Case) -> None:
    case.make_target = lambda generator, rows: torch.rand(rows, generator=generator).tolist()
    case.loss = lambda net: (
        lambda output, target: torch.stack(
            [(row.mean() - value).square() for row, value in zip(output, target, strict=False)]
        ).mean()
    )
    case.options["numerics"] = Numerics(loss_reduction="mean")


@_of("rows", "Current 2", "loss", "target", "sample", "between", "call", "part", share=1)
def _time_first(case: Case) -> None:
    case.place(layers.TimeFirst)
    case.inputs.append(lambda generator, rows, number: {"x": torch.randn(5, rows, WIDTH, generator=generator)})
    case.make_target = lambda generator, rows: torch.randn(5, rows, WIDTH, generator=generator)
    case.part = lambda batch, begin, end: Batch(
        inputs={name: value[:, begin:end] for name, value in batch.inputs.items()}, target=batch.target[:, begin:end]
    )
    case.weigh = lambda part: float(part.target.shape[1])
    if case.draws_random or case.draw.random() < 0.7:
        case.options["numerics"] = Numerics(split_dims=1)


@_of("rows", "Current 2", "call", "finish", "loss", where="process")
def _outputs_in_an_object(case: Case) -> None:
    _keep_a_feature(case)

    def call(run: Run, batch: Batch) -> None:
        with torch.no_grad():
            made = run.separate_outputs(batch.inputs)
        run.seen.append(torch.cat([one.rows for one in made]))
        run.seen.append(torch.cat([one.feature for one in made]))
        run.seen.append(run.step(batch))

    case.finish = lambda net, at, x, extras: _Output(x, extras["feature"])
    case.loss = lambda net: lambda output, target: functional.mse_loss(output.rows, target)
    case.call = call


class _Output:
    def __init__(self, rows: Tensor, feature: Tensor) -> None:
        self.rows, self.feature = rows, feature


@_of("rows", "Current 2", "call", "finish", "loss", where="process")
def _outputs_without_rows(case: Case) -> None:
    def call(run: Run, batch: Batch) -> None:
        with torch.no_grad():
            outputs = run.separate_outputs(batch.inputs)
        run.seen.append(torch.cat([one["rows"] for one in outputs]))
        means = [mean for one in outputs for mean in (one["mean"] if isinstance(one["mean"], list) else [one["mean"]])]
        run.seen.append(all(mean.shape == (WIDTH,) for mean in means))
        run.seen.append(run.step(batch))

    case.finish = lambda net, at, x, extras: {"rows": x, "mean": x.mean(0)}
    case.loss = lambda net: lambda output, target: functional.mse_loss(output["rows"], target)
    case.call = call


@_of("rows", "Current 2", "between", "part")
def _packed_rows(case: Case) -> None:
    case.gives_microbatches = True
    case.inputs.append(
        lambda generator, rows, number: {
            "patches": torch.randn(3 * rows, WIDTH, generator=generator),
            "sizes": torch.full((rows,), 3),
        }
    )

    def between(net: Net, at: int, x: Tensor, extras: dict[str, Any]) -> Tensor:
        if at != 0:
            return x
        return x + torch.stack([one.mean(0) for one in extras["patches"].split(extras["sizes"].tolist())])

    def part(batch: Batch, begin: int, end: int) -> Batch:
        inputs = {name: cut(value, begin, end) for name, value in batch.inputs.items()}
        inputs["patches"] = batch.inputs["patches"][3 * begin : 3 * end]
        return Batch(inputs=inputs, target=cut(batch.target, begin, end))

    case.between.append(between)
    case.part = part
