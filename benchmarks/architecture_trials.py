"""Trials of one transformers class: build it, train it plain, train it on three stages, compare.

`trial` runs in a process of its own. It first searches for a configuration and a form of inputs with which a plain
training step gives a finite loss and gradients. With these, it trains two steps on three stages for each batch of
BATCHES, and compares losses and gradients with `reference_step`, a plain loop over the same micro-batches.
"""

import copy
import itertools
import random
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from model_inputs import Recipe, learned, microbatch, recipes
from tiny_configs import tiny_configs
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from pipesched import Microbatch, Pipeline
from pipesched.errors import PipeschedError
from pipesched.tensors.payload import pytree
from pipesched.testing import reference_step

__all__ = ["BATCHES", "trial"]

MICROBATCHES = 4
ROWS = 2  # of a micro-batch
STEPS = 2
RANKS = 3
RATE = 0.01
ROUNDING = 1e-4
LARGEST = 120_000_000  # parameters
SEARCH_S = 60.0
FULL, SHORT, SHORTER = 1.0, 0.75, 0.5

#: The lengths of the rows of each micro-batch. A model without a mask has the same inputs in all of them.
BATCHES: dict[str, list[tuple[float, float]]] = {
    "all padded": [(SHORT, SHORTER)] * MICROBATCHES,
    "last without padding": [*[(SHORT, SHORTER)] * (MICROBATCHES - 1), (FULL, FULL)],
    "first without padding": [(FULL, FULL), *[(SHORT, SHORTER)] * (MICROBATCHES - 1)],
}


@dataclass(frozen=True)
class Specimen:
    """A class with a configuration and a form of inputs that train plain."""

    kind: type[PreTrainedModel]
    config: PretrainedConfig
    way: str
    recipe: Recipe
    output: Any = None

    def model(self) -> PreTrainedModel:
        """Return the model in training mode, with the same weights at each call."""
        seed()
        return self.kind(copy.deepcopy(self.config)).train()

    def batch(self, lengths: Sequence[tuple[float, float]]) -> list[dict[str, Any]]:
        """Return the keyword inputs of each micro-batch."""
        return [
            microbatch(self.kind, self.config, self.recipe, rows, seed, self.output)
            for seed, rows in enumerate(lengths)
        ]


def trial(name: str, batches: Sequence[str] = tuple(BATCHES)) -> dict[str, Any]:
    """Return what became of a class, as a JSON object."""
    torch.set_num_threads(1)
    kind = getattr(transformers, name)
    start = time.perf_counter()
    record: dict[str, Any] = {"name": name, "model": kind.__module__.split(".")[-2], "built": False, "plain": False}
    search = Search(kind)
    specimen = search.found()
    record["built"] = search.num_built > 0
    if specimen is None:
        record["cause"] = search.cause()
    else:
        record |= {"plain": True, "way": specimen.way, "recipe": str(specimen.recipe), "trials": {}}
        for batch in batches:
            if record["trials"] and not _differ(specimen, batch):
                continue  # the model has no mask
            record["trials"][batch] = _pipelined(specimen, BATCHES[batch])
    return record | {"seconds": round(time.perf_counter() - start, 2)}


def seed() -> None:
    """Seed all generators that models draw from."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


# ---- a plain training step -------------------------------------------------------------------------------------------


class Search:
    """Searches for a configuration and a form of inputs with which a class trains plain."""

    def __init__(self, kind: type[PreTrainedModel]) -> None:
        self.num_built = 0
        self._kind = kind
        self._models: list[tuple[str, PretrainedConfig, PreTrainedModel]] = []
        self._configs = self._all_configs()
        self._build_failures: list[str] = []
        self._step_failures: list[str] = []
        self._end = time.perf_counter() + SEARCH_S

    def found(self) -> Specimen | None:
        """Return the first that trains plain. Forms with all modalities come first."""
        for _, forms in itertools.groupby(
            recipes(self._kind), key=lambda form: (form.images, form.sound, form.own_loss)
        ):
            same = list(forms)
            for way, config, model in self._built():
                specimen = self._in_one_form(same, way, config, model)
                if specimen is not None:
                    return specimen
                if time.perf_counter() > self._end:
                    return None
        return None

    def cause(self) -> str:
        """Return the first error of a step, or of building if no configuration was built."""
        failures = self._step_failures or self._build_failures
        return failures[0] if failures else "no form of inputs"

    def _all_configs(self) -> Iterator[tuple[str, PretrainedConfig]]:
        try:
            yield from tiny_configs(self._kind)
        except Exception as error:
            self._build_failures.append(told(error))

    def _built(self) -> Iterator[tuple[str, PretrainedConfig, PreTrainedModel]]:
        yield from self._models
        for way, config in self._configs:
            try:
                if _size(self._kind, config) > LARGEST:
                    self._build_failures.append(f"more than {LARGEST:,} parameters")
                    continue
                seed()
                model = self._kind(copy.deepcopy(config)).train()
            except Exception as error:
                self._build_failures.append(told(error))
                continue
            self.num_built += 1
            self._models.append((way, config, model))
            yield self._models[-1]

    def _in_one_form(
        self, forms: Sequence[Recipe], way: str, config: PretrainedConfig, model: PreTrainedModel
    ) -> Specimen | None:
        """Try the forms of labels in turn, unless the model fails without labels, too."""
        for number, form in enumerate(forms):
            recipe: Recipe | None = form
            while recipe is not None:
                specimen = Specimen(self._kind, config, way, recipe)
                try:
                    return _trained_plain(specimen, model)
                except Exception as error:
                    self._step_failures.append(told(error))
                    recipe = learned(recipe, error, config, ROWS)
            if number == 0 and len(forms) > 1 and not self._runs_without_labels(form, way, config, model):
                return None
        return None

    def _runs_without_labels(self, form: Recipe, way: str, config: PretrainedConfig, model: PreTrainedModel) -> bool:
        recipe: Recipe | None = replace(form, own_loss=False)
        while recipe is not None:
            try:
                model(**Specimen(self._kind, config, way, recipe).batch([(FULL, FULL)])[0])
            except Exception as error:
                recipe = learned(recipe, error, config, ROWS)
            else:
                return True
        return False


def _size(kind: type[PreTrainedModel], config: PretrainedConfig) -> int:
    """Return the number of parameters, or 0 if the class cannot be built without memory."""
    try:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in kind(copy.deepcopy(config)).parameters())
    except Exception:
        return 0


def _trained_plain(specimen: Specimen, model: PreTrainedModel) -> Specimen:
    """Run a plain step for one micro-batch without and one with padding; raise an error if the loss is not finite."""
    if specimen.recipe.labels == "output":
        unlabelled = replace(specimen, recipe=replace(specimen.recipe, own_loss=False))
        specimen = replace(specimen, output=_first_float(model(**unlabelled.batch([(FULL, FULL)])[0])).detach())
    for inputs in specimen.batch([(SHORT, SHORTER), (FULL, FULL)]):
        seed()
        model.zero_grad()
        loss = _loss(specimen.recipe, model(**inputs))
        if not torch.isfinite(loss).all():
            raise ValueError(f"the loss is {loss.tolist()}")
        loss.backward()
        if all(parameter.grad is None for parameter in model.parameters()):
            raise ValueError("no weight has a gradient")
    return specimen


def _loss(recipe: Recipe, output: Any) -> Tensor:
    if not recipe.own_loss:
        return mean_square(output, None)
    loss = output["loss"] if isinstance(output, dict) else output.loss
    if loss is None:
        raise ValueError("the output has no loss")
    return loss


def mean_square(output: Any, target: Any) -> Tensor:
    """Return the mean square of the first output with a gradient, as the loss of models that compute none.

    If the only such output is a loss of the model's own, return it.
    """
    first = _first_float(output).float()
    return first.square().mean() if first.dim() else first


def _first_float(output: Any) -> Tensor:
    leaves = pytree.tree_leaves(dict(output) if isinstance(output, dict) else output)
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad]
    if not found:
        raise ValueError("no output has a gradient")
    return next((leaf for leaf in found if leaf.dim()), found[0])


# ---- three stages ----------------------------------------------------------------------------------------------------


def _differ(specimen: Specimen, name: str) -> bool:
    """Whether the batch has other inputs than the batch in which all micro-batches are padded."""
    one, other = (pytree.tree_leaves(specimen.batch(BATCHES[batch])) for batch in ("all padded", name))
    return not all(_same(a, b) for a, b in zip(one, other, strict=True))


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


def _pipelined(specimen: Specimen, lengths: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Train on three stages and compare with the plain loop. Return the verdict, and the error if there is one."""
    batch = specimen.batch(lengths)
    options: dict[str, Any] = {"seed": 3}
    if not specimen.recipe.own_loss:
        options["loss_fn"] = mean_square
    found: dict[str, Any] = {}
    try:
        model = specimen.model()
        start = time.perf_counter()
        pipe = Pipeline(
            model, batch[0], devices=["cpu"] * RANKS, schedule="1f1b", num_microbatches=MICROBATCHES, **options
        )
        found["construction_s"] = round(time.perf_counter() - start, 4)
        with pipe:
            ours = _steps(model, lambda step: pipe.step(**_arguments(batch, specimen.recipe)))
    except BaseException as error:
        place = "step" if "construction_s" in found else "construction"
        return found | {"verdict": _verdict(error), "place": place, "error": told(error), "message": str(error)[:2000]}
    try:
        model = specimen.model()
        form = {"num_microbatches": MICROBATCHES}
        plain = _steps(
            model,
            lambda step: reference_step(model, step=step, **form, **options, **_arguments(batch, specimen.recipe)),
        )
    except BaseException as error:
        return found | {
            "verdict": "fails",
            "place": "reference_step",
            "error": told(error),
            "message": str(error)[:2000],
        }
    difference = max(_difference(ours.get(name), plain.get(name)) for name in {*ours, *plain})
    tied = _has_ties(model)
    verdict = "same bits" if difference == 0 else "close" if difference < ROUNDING else "wrong"
    return found | {"verdict": verdict, "difference": difference, "tied": tied}


def _verdict(error: BaseException) -> str:
    return "refused" if isinstance(error, PipeschedError) else "fails"


def _arguments(batch: list[dict[str, Any]], recipe: Recipe) -> dict[str, Any]:
    """Return the arguments of a step: the batch as a whole if all its tensors have one row a row, else in parts."""
    target = {} if recipe.own_loss else {"target": torch.zeros(ROWS)}
    if not all(_has_rows(value) for inputs in batch for value in inputs.values()):
        return {"microbatches": [Microbatch(**inputs, **target) for inputs in batch]}
    whole = {name: _joined([inputs[name] for inputs in batch]) for name in batch[0]}
    return whole if recipe.own_loss else {**whole, "target": torch.zeros(ROWS * len(batch))}


def _has_rows(value: Any) -> bool:
    return not isinstance(value, Tensor | list) or len(value) == ROWS


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    return list(itertools.chain(*parts)) if isinstance(parts[0], list) else parts[0]


def _steps(model: nn.Module, step: Any) -> dict[str, Tensor]:
    """Run steps with a plain update after each; return all losses and gradients by step and name."""
    seen = {}
    for number in range(STEPS):
        seed()
        model.zero_grad()
        seen[f"{number} loss"] = step(number).detach().clone().reshape(())
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                seen[f"{number} {name}"] = parameter.grad.detach().clone()
                with torch.no_grad():
                    parameter.sub_(RATE * parameter.grad)
    return seen


def _difference(one: Tensor | None, other: Tensor | None) -> float:
    """Return the largest difference of two tensors, relative to the largest value."""
    if one is None or other is None or one.shape != other.shape:
        return float("inf")
    one, other = one.to_dense() if one.is_sparse else one, other.to_dense() if other.is_sparse else other
    if torch.equal(one, other) or torch.equal(one.nan_to_num(7), other.nan_to_num(7)):
        return 0.0
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-12))


def _has_ties(model: nn.Module) -> bool:
    names = sum(1 for _ in model.named_parameters(remove_duplicate=False))
    return names > sum(1 for _ in model.named_parameters())


# ---- errors ----------------------------------------------------------------------------------------------------------


def told(error: BaseException) -> str:
    """Return an error as one line: its type, its text, and the line of a model's code that raised it."""
    text = " ".join(str(error).split())[:600]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "transformers/models/" in frame.filename] or frames
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {text}{place}"
