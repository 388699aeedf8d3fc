"""Agreement: the facts that must be identical on all ranks of a mesh, and a message that names the differences."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipesched.model.stale_weights import is_stale
from pipesched.tensors.payload import opened, pytree
from pipesched.tensors.sampled_values import digest_of_values

__all__ = ["Facts", "differences", "facts_of_model", "facts_of_weights", "form_of_sample", "modes_of_model"]

#: Name of a fact, such as "the dtype of block.3.weight" -> its value as text.
Facts = Mapping[str, str]

_DIGITS = 8  # of the digest of a tensor's values
_SHOWN = 3  # differences of one rank that a message spells out


def facts_of_model(model: nn.Module) -> dict[str, str]:
    """Return facts about a model: module classes, settings and modes; tensor shapes, dtypes and ``requires_grad``."""
    facts = {}
    for name, module in model.named_modules():
        facts[f"the class of {_place(name)}"] = type(module).__qualname__
        if type(module).__module__.startswith("torch.nn."):
            facts[f"the settings of {_place(name)}"] = module.extra_repr()
    for name, tensor in _tensors(model):
        facts[f"the shape of {name}"] = str(list(tensor.shape))
        facts[f"the dtype of {name}"] = str(tensor.dtype).removeprefix("torch.")
    facts |= {f"requires_grad of {name}": str(own.requires_grad) for name, own in model.named_parameters()}
    return facts | {f"the training mode of {_place(name)}": str(own.training) for name, own in model.named_modules()}


def modes_of_model(model: nn.Module, *, whole: bool) -> dict[str, str]:
    """Return the training modes of the model and of its modules without tensors. All ranks must have the same modes.

    The mode of any other module matters only on the rank that runs it, so each rank can set it separately. If
    ``whole`` is True, only the mode of the model itself is returned, because ``wrap=`` may have added different modules
    on each rank.
    """
    modes = {"the training mode of the model": str(model.training)}
    for name, module in () if whole else model.named_modules():
        if name and not any(True for _ in _tensors(module)):
            modes[f"the training mode of {name}"] = str(module.training)
    return modes


def facts_of_weights(model: nn.Module, gathered: Callable[[Facts], list[Facts]]) -> Facts:
    """Return facts about the values of a model's parameters and buffers, from a few values of each.

    Returns no facts if the ranks of this replica have the same values. (All replicas start with the weights of the
    first one.) A tensor on the meta device has no values: for such a tensor, the fact is that of the first rank that
    has values. ``gathered`` returns the facts of this replica's ranks.
    """
    stale = is_stale(model)  # then each rank has new values for the weights that it trains alone
    own = {
        f"the values of {name}": digest_of_values(tensor, devices=True).hex()[:_DIGITS]
        for name, tensor in _tensors(model)
        if not tensor.is_meta and not is_lazy(tensor) and not stale
    }
    known: dict[str, str] = {}
    every = gathered(own)
    for facts in every:
        known = {**facts, **known}
    same = all(known[name] == value for facts in every for name, value in facts.items())
    return {} if same else {**known, **own}


def form_of_sample(sample: Any) -> str:
    """Describe a sample as text: the shapes and dtypes of its tensors, and its plain values."""
    leaves = pytree.tree_leaves(opened(sample))
    forms = [
        f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in leaves
        if isinstance(leaf, Tensor | bool | int | float | str | None)
    ]
    return f"({', '.join(forms)})"


def differences(facts: Sequence[Facts]) -> str:
    """For each rank whose facts differ from those of rank 0, describe the first few differences."""
    return "; ".join(_of_rank(rank, own, facts[0]) for rank, own in enumerate(facts) if own != facts[0])


def _of_rank(rank: int, own: Facts, first: Facts) -> str:
    odd = [name for name in {**first, **own} if own.get(name) != first.get(name)]
    said = [f"{name} is {_value(own, name)}, but {_value(first, name)} on rank 0" for name in odd[:_SHOWN]]
    more = f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
    return f"rank {rank} differs from rank 0: {', '.join(said)}{more}"


def _value(facts: Facts, name: str) -> str:
    return facts.get(name) or ("missing" if name not in facts else "empty")


def _place(name: str) -> str:
    return name or "the model"


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
