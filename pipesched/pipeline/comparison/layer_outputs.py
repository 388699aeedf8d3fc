"""Layer outputs: records the outputs of layers in a run, and finds the first layer whose outputs differ in another."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.tensors.tree_structure import tensors_in

__all__ = ["LayerOutputs"]

_ROUNDING = 1e-3


class LayerOutputs:
    """The outputs of the layers in one run. A micro-batch that is recomputed counts once.

    Args:
        layers: layer name -> layer, in the order in which they run.

    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._layers = layers
        #: Layer -> digest of an output -> (the sum of its values, the sum of their absolute values, their number).
        self._seen: dict[str, dict[bytes, tuple[float, float, int]]] = {name: {} for name in layers}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the outputs of all calls of the layers in the ``with`` block, in any thread."""
        handles = [layer.register_forward_hook(partial(self._note, name)) for name, layer in self._layers.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        with torch.no_grad():
            for tensor in tensors_in(output):
                if type(tensor) is Tensor and tensor.layout is torch.strided and tensor.is_floating_point():
                    values = tensor.detach().cpu().double().contiguous()
                    digest = blake2b(values.numpy().tobytes(), digest_size=16).digest()
                    self._seen[name][digest] = float(values.sum()), float(values.abs().sum()), values.numel()

    def first_unlike(self, due: "LayerOutputs", *, exact: bool) -> str:
        """Return the first layer that returned something else than in the run ``due``; "" if there is none.

        Without ``exact``, the runs may cut the rows differently: means over all rows are compared, up to rounding.
        """
        for name, ours in self._seen.items():
            theirs = due._seen[name]
            if exact and ours.keys() - theirs.keys():
                return name
            if not exact and not _alike(ours, theirs):
                return name
        return ""


def _alike(ours: Mapping[bytes, tuple[float, float, int]], theirs: Mapping[bytes, tuple[float, float, int]]) -> bool:
    (sum_1, size_1, count_1), (sum_2, size_2, count_2) = map(_total, (ours, theirs))
    if count_1 != count_2:
        return True  # copies of layers, and layers of other ranks, are not seen
    limit = _ROUNDING * max(size_1, size_2)
    return abs(sum_1 - sum_2) <= limit and abs(size_1 - size_2) <= limit


def _total(seen: Mapping[bytes, tuple[float, float, int]]) -> tuple[float, float, int]:
    sums, sizes, counts = zip(*seen.values(), strict=True) if seen else ((0.0,), (0.0,), (0,))
    return sum(sums), sum(sizes), sum(counts)
