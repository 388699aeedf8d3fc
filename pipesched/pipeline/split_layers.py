"""Split layers: splits layers of the user's model over the ranks of a tensor group, and finds what each layer gets.

The layers are split in place before the model is captured. So the record of the model has the shapes of this rank's
blocks. While a pipeline is made, and while layers are measured, the collectives in split layers exchange nothing
(`RankHost.alone`), because each process runs the layers by itself.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.capture.layered_model import LayeredModel
from pipesched.capture.stage_module import Wrap
from pipesched.model.state_guard import set_aside, untouched
from pipesched.parallel.dropout import DividedRandom
from pipesched.parallel.styles import divide_losses, split_model
from pipesched.parallel.tensor_group import ActivationLayout, TensorGroup
from pipesched.parallel.weight_split import SplitWeights
from pipesched.pipeline.options import Distributed
from pipesched.runtime.rank_host import RankHost
from pipesched.tensors.keyed_random import KeyedRandom
from pipesched.tensors.meta_tensors import Beside
from pipesched.tensors.payload import pytree

__all__ = ["random_numbers", "split_layers"]

_META = torch.device("meta")


def split_layers(
    model: nn.Module, loss_fn: Any, host: RankHost, distributed: Distributed, *, wrap: Wrap | None, compiles: bool
) -> SplitWeights | None:
    """Split layers of the model in place over the ranks of the tensor group. Return how, or None if no layer is split.

    Args:
        model: the user's module.
        loss_fn: the user's loss, which may take divided logits; None if the model computes its own loss.
        host: the host of the ranks.
        distributed: the options, of which ``tensor_parallel`` names the layers.
        wrap: the user's ``wrap=``, which must be None if layers are split.
        compiles: whether the user passed ``compile=``, which must be False if layers are split.

    Raises:
        InputError: the layers cannot be split as ``tensor_parallel=`` asks.

    """
    distributed.check_tensor_parallel(
        None if host.grid.in_one_process else host.grid, wraps=wrap is not None, compiles=compiles
    )
    if distributed.tensor_parallel is None or host.tensor is None:
        return None
    divide_losses(loss_fn, host.tensor)
    return split_model(model, distributed.tensor_parallel, host.tensor)


def random_numbers(
    model: nn.Module, layered: LayeredModel, split: SplitWeights | None
) -> Callable[[torch.device], KeyedRandom]:
    """Return a function that makes the random numbers of a stage on a device.

    Args:
        model: the user's module.
        layered: its layers.
        split: the weights that the ranks of a tensor group divide; None if no layer is split.

    """
    if split is None:
        return KeyedRandom
    group: Any = split.group
    return partial(DividedRandom, group=group, layouts=_layouts(model, layered, group))


def _layouts(model: nn.Module, layered: LayeredModel, group: TensorGroup) -> dict[str, ActivationLayout]:
    """Return the layout of the activations that each layer gets, for layers that do not get whole activations.

    The model runs once on the meta device, so that nothing is computed.
    """
    found: dict[str, ActivationLayout] = {}
    with group.alone(), _noting(layered.modules, group, found), suppress(Exception):  # any error of a model's code
        group.layout = ActivationLayout.WHOLE
        _run_on_meta(model, *layered.sample)
    group.layout = ActivationLayout.WHOLE
    return {name: layout for name, layout in found.items() if layout is not ActivationLayout.WHOLE}


@contextmanager
def _noting(layers: Mapping[str, nn.Module], group: TensorGroup, found: dict[str, ActivationLayout]) -> Iterator[None]:
    """Note the layout at the first call of each layer in the ``with`` block."""

    def note(name: str, *_: Any) -> None:
        found.setdefault(name, group.layout)

    handles = [layer.register_forward_pre_hook(partial(note, name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _run_on_meta(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    own = {name: torch.empty_like(tensor, device=_META) for name, tensor in tensors.items()}
    args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device=_META), (args, kwargs))
    with set_aside(model), untouched(model, model.training), torch.no_grad(), Beside(_META):
        torch.func.functional_call(model, own, args, kwargs)
