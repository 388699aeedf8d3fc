"""Tensor split: which parts of a layer the ranks of a tensor group divide, and what the group exchanges for it.

The ranks of a tensor group split each layer (Shoeybi et al. 2019, arXiv:1909.08053): matrix products, attention heads
and the vocabulary are divided, and norms, dropouts and residual sums are computed by each rank in whole. A block of a
transformer sums two tensors over the group in its forward, and two in its backward.

In a layout in two or three dimensions (`pipesched.simulation.tensor_layout`), the ranks exchange blocks of X, W and Y
of each product Y = X W instead. What they send is proportional to the sizes of these matrices, so a layer has their
sums.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

from pipesched.checks import is_count
from pipesched.errors import ScheduleError
from pipesched.json_files import read_fields

__all__ = ["COUNTED", "SPLIT_COUNTS", "SPLIT_SHARES", "SPLIT_SIZES", "TRAFFIC", "TensorShares", "TensorTraffic"]


@dataclass(frozen=True, kw_only=True)
class TensorShares:
    """The shares of a layer that the ranks of a tensor group divide, and the sizes of what they exchange.

    A share is a number from 0 (every rank does all of it) to 1 (divided evenly). Profiles and tables of layers have
    these values under the same names. The values after those of all-reduces are for layouts in two and three
    dimensions. Linear layers form pairs, such as h -> 4h -> h; "first" and "second" are the products of the first and
    the second of each pair.
    """

    #: The share of the forward's time.
    split_forward: float = 0
    #: The share of the full backward's time.
    split_backward: float = 0
    #: The share of the weight gradients' time.
    split_weight_grad: float = 0
    #: The share of the parameters, their gradients and the optimizer's state.
    split_parameters: float = 0
    #: The share of the activations that are held for the backward.
    split_activations: float = 0
    #: The size of all tensors that a forward sums over the group.
    all_reduce_forward_bytes: int = 0
    #: The size of all tensors that a backward sums over the group.
    all_reduce_backward_bytes: int = 0
    #: The number of all-reduces in a forward.
    all_reduces_forward: int = 0
    #: The number of all-reduces in a backward.
    all_reduces_backward: int = 0
    #: The size of the inputs X of all first products.
    first_input_bytes: int = 0
    #: The size of the outputs Y of all first products.
    first_output_bytes: int = 0
    #: The size of the inputs of all second products.
    second_input_bytes: int = 0
    #: The size of the outputs of all second products.
    second_output_bytes: int = 0
    #: The size of the weights W of all products.
    product_weight_bytes: int = 0
    #: The size of the outputs of split embeddings.
    embedding_output_bytes: int = 0
    #: The size of one number for each row, for all norms.
    norm_row_bytes: int = 0
    #: The size of the weights that all rows use without a product: biases, weights of norms, positions.
    summed_weight_bytes: int = 0
    #: The number of first products.
    first_products: int = 0
    #: The number of second products.
    second_products: int = 0
    #: The number of norms.
    norms: int = 0
    #: The number of sums of their gradients: one for each bias, and one for each norm.
    summed_weights: int = 0

    def __bool__(self) -> bool:
        """Whether the ranks of a tensor group divide any part of the layer."""
        return any(vars(self).values())

    @property
    def num_products(self) -> int:
        """The number of products of split linear layers."""
        return self.first_products + self.second_products

    def split_input_grad(self, backward_s: float, weight_grad_s: float) -> float:
        """Return the share of the input gradients' time: what the backward divides besides the weight gradients."""
        rest_s = backward_s - weight_grad_s
        if rest_s <= 0:
            return self.split_backward
        return min(1.0, max(0.0, (self.split_backward * backward_s - self.split_weight_grad * weight_grad_s) / rest_s))


#: The names of the shares, of the sizes and of the counts in `TensorShares`.
SPLIT_SHARES = tuple(item.name for item in fields(TensorShares) if item.name.startswith("split_"))
SPLIT_SIZES = tuple(item.name for item in fields(TensorShares) if item.name.endswith("_bytes"))
#: The counts of `TensorShares` for layouts in two and three dimensions, with the sizes of what they count.
COUNTED = {
    "first_products": ("first_input_bytes", "first_output_bytes"),
    "second_products": ("second_input_bytes", "second_output_bytes"),
    "norms": ("norm_row_bytes",),
    "summed_weights": ("summed_weight_bytes",),
}
SPLIT_COUNTS = ("all_reduces_forward", "all_reduces_backward", *COUNTED)


@dataclass(frozen=True, kw_only=True)
class TensorTraffic:
    """The time of a tensor group's collectives in the actions of one micro-batch, and the bytes that a rank sends.

    The times are parts of the times of the actions. A full backward has the collectives of the input gradients and
    those of the weight gradients.
    """

    forward_s: float = 0
    input_grad_s: float = 0
    weight_grad_s: float = 0
    forward_bytes: int = 0
    input_grad_bytes: int = 0
    weight_grad_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("forward_bytes", "input_grad_bytes", "weight_grad_bytes"):
            if not is_count(getattr(self, name), 0):
                raise ScheduleError(
                    f"a rank sends a whole number of bytes to its tensor group; {name} is {getattr(self, name)!r}; "
                    f"save the file again"
                )

    def __add__(self, other: "TensorTraffic") -> "TensorTraffic":
        """Return the collectives of two layers in sequence."""
        return TensorTraffic(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __bool__(self) -> bool:
        """Whether there are any collectives."""
        return any(vars(self).values())

    def recomputed(self) -> "TensorTraffic":
        """Return the collectives if the forward runs again before the backward."""
        again = TensorTraffic(input_grad_s=self.forward_s, input_grad_bytes=self.forward_bytes)
        return self + again

    def scaled(self, factor: float) -> "TensorTraffic":
        """Return a copy with all times multiplied by ``factor``."""
        times = {name: value * factor for name, value in vars(self).items() if name.endswith("_s")}
        return TensorTraffic(**{**vars(self), **times})

    @property
    def backward_s(self) -> float:
        """The time of the collectives in a full backward."""
        return self.input_grad_s + self.weight_grad_s

    @property
    def backward_bytes(self) -> int:
        """The bytes that a rank sends in a full backward."""
        return self.input_grad_bytes + self.weight_grad_bytes

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> "TensorTraffic":
        """Make the traffic from the dict that ``to_dict`` returned. Raises ScheduleError for invalid values."""
        return read_fields(cls, values, "the collectives of a tensor group must have")


#: The names under which a profile whose layers are split has the fields of `TensorTraffic`.
TRAFFIC = {f"tensor_{item.name}": item.name for item in fields(TensorTraffic)}
