"""Model forms: a split model, as blocks for the pipeline that runs it, or as whole layers for all other code."""

from collections.abc import Iterable

import torch
from torch import nn

from pipesched.parallel.split_module import SplitForm, restore
from pipesched.parallel.weight_split import SplitWeights

__all__ = ["ModelForms"]


class ModelForms:
    """The two forms of a split model. Modules and Parameters stay the same objects.

    Args:
        model: the model, as blocks.
        split: the weights that the ranks of a tensor group divide.

    """

    def __init__(self, model: nn.Module, split: SplitWeights) -> None:
        self._split = split
        self._modules = list(model.modules())
        named = model.named_parameters(remove_duplicate=False)
        self._names = {parameter: name for name, parameter in named if name in split}
        self._forms: list[SplitForm] = []
        self._whole: list[nn.Parameter] = []

    @property
    def is_whole(self) -> bool:
        """Whether the modules have their own classes and attributes."""
        return bool(self._forms)

    def make_whole(self, weights: Iterable[nn.Parameter]) -> None:
        """Give all modules their own classes and attributes. The caller has made these ``weights`` whole."""
        forms = map(SplitForm.of, self._modules)
        self._forms = [form for form in forms if form is not None]
        self._whole = [weight for weight in weights if weight in self._names]
        for form in self._forms:
            restore(form.module)

    @torch.no_grad()
    def make_blocks(self) -> None:
        """Let all modules be split again, with this rank's blocks of the weights that are whole."""
        forms, self._forms = self._forms, []
        weights, self._whole = self._whole, []
        for form in forms:
            form.put_on()
        for weight in weights:
            weight.data = self._split.own(self._names[weight], weight.detach()).clone()
