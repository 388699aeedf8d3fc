"""Loss reading: finds how a loss function reduces over the rows of a batch, from the torch functions that it calls.

A function mode runs around a call of the loss. It tags each tensor: the tensor holds values of single rows, a mean over
all rows, or a sum over all rows. Sums and multiples of means are means. Any other result, such as a quotient of two
sums, is unclear, because the weights of the micro-batches do not follow from it.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pipesched.capture.loss_reduction import LossReduction, counting, stated_reduction
from pipesched.devices.transfers import MOVE_NAMES
from pipesched.errors import InputError
from pipesched.tensors.payload import pytree
from pipesched.tensors.tensor_table import TensorTable
from pipesched.tensors.torch_functions import DIFFERENTIATES, LOSSES, name_of
from pipesched.tensors.tree_structure import tensors_in

__all__ = ["Counted", "LossReader", "Reduced", "Unclear", "Weight"]

#: How the values of a tensor relate to the rows of the batch: "rows" if each entry of dim 0 belongs to one row,
#: "elements" if the tensor has an equal number of values for each row, "selected" if rows may have different numbers of
#: values. If elements were averaged or added over some dims, it is unknown whether these dims had the rows: "means" or
#: "sums".
_Values = Literal["rows", "elements", "means", "sums", "selected"]


@dataclass(frozen=True)
class Reduced:
    """A mean or a sum over all rows of a micro-batch."""

    reduction: LossReduction
    #: For a mean, the functions that compute the weight of a micro-batch from its target; None stands for its rows.
    #: Empty if the mean is 0.
    weights: "frozenset[Weight]" = frozenset()


@dataclass(frozen=True)
class Unclear:
    """Values from which the weight of a micro-batch does not follow."""

    #: What made the values, such as "sqrt() of a mean".
    maker: str


_Tag = _Values | Reduced | Unclear

_ADDS = {"add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__rsub__", "__isub__", "rsub"}
_MULTIPLIES = {"mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"}
_DIVIDES = {"div", "div_", "divide", "true_divide", "__truediv__", "__div__", "__itruediv__"}
#: Functions of a reduced value that give the same value, perhaps in another form.
_KEEPS = {"clone", "contiguous", "detach", "requires_grad_", "neg", "negative", "__neg__", "positive", "__pos__"}
_KEEPS |= {"double", "float", "half", "bfloat16", "type", "type_as"} | MOVE_NAMES
_KEEPS |= {"reshape", "squeeze", "unsqueeze", "view"}
_STACKS = {"stack", "cat", "concat", "concatenate", "hstack", "vstack"}
#: Functions of several reduced values, or of one, that add them or put them together.
_JOINS = _ADDS | _KEEPS | _STACKS | {"sum", "mean"}
_MOVES_DIMS = {"permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "adjoint"}
_MOVES_DIMS |= {f"torch.Tensor.{name}.__get__" for name in ("T", "mT", "H", "mH")}
_RESHAPES = {"reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze", "reshape_as", "view_as", "ravel"}
_SELECTS = {"__getitem__", "masked_select"}
_MATRIX_PRODUCTS = {"matmul", "__matmul__", "mm", "bmm", "linear"}
_SIZES = {"torch.Tensor.shape.__get__", "size", "__len__", "numel", "nelement"}


class LossReader(TorchFunctionMode):
    """A function mode for one call of a loss.

    Args:
        output: the output of the model. A number among the outputs is taken for a mean over rows.
        target: the target of the micro-batch; None if there is none.
        check: a function that raises an error if the loss may not use a tensor. It gets each tensor that neither
            depends on the output and the target nor was made by the loss.
        rows_in_front: whether dim 0 of the output and the target has the rows.

    """

    def __init__(
        self, output: Any, target: Any, check: Callable[[Tensor], None] = lambda tensor: None, *, rows_in_front: bool
    ) -> None:
        super().__init__()
        self._tags = TensorTable[_Tag | None]()
        self._check = check
        #: tensor that depends on the target and on constants alone -> the function of the target that makes it
        self._made_from_target = TensorTable[Callable[[Any], Any]]()
        self._sizes: set[float] = set()  # the numbers of rows and of elements, once the loss has read a size
        tensors = [*tensors_in((output, target))]
        self._counts = {float(number) for one in tensors for number in (*one.shape[:1], one.numel())}
        for tensor in tensors:
            self._tags[tensor] = "rows" if rows_in_front else "elements"
        for tensor in tensors_in(output):
            if not tensor.dim():
                self._tags[tensor] = Reduced("mean", _ROWS)
        for place, leaf in enumerate(pytree.tree_leaves(target)):
            if isinstance(leaf, Tensor):
                self._made_from_target[leaf] = _TargetLeaf(place)
                if not leaf.dim():  # all micro-batches get this tensor
                    self._tags[leaf] = None

    def reading(self, loss: Tensor) -> Reduced | Unclear:
        """Return how the loss that the call returned reduces over rows."""
        tag = self._tags.get(loss)
        if tag is None:
            if loss.requires_grad:
                return Unclear("code that is no torch function")
            return Reduced("mean", _ROWS)  # a constant, which is the mean of itself
        return tag if isinstance(tag, Reduced | Unclear) else Unclear("values of single rows")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        taken = list(tensors_in((args, kwargs)))
        for tensor in taken:
            if tensor not in self._tags:
                self._check(tensor)
        result = _differentiated(func, args, kwargs) if func in DIFFERENTIATES else func(*args, **kwargs)
        tags = [self._tags.get(tensor) for tensor in taken]
        known = [tag for tag in tags if tag is not None]
        if name in _SIZES and known:
            self._sizes |= self._counts
        tag = self._tag_of(_TaggedCall(func, name, args, kwargs, taken, tags, result)) if known else None
        for tensor in tensors_in(result):
            self._tags[tensor] = tag
        self._note_target(func, args, kwargs, taken, result)
        return result

    def _note_target(self, func: Any, args: Any, kwargs: Any, taken: Sequence[Tensor], result: Any) -> None:
        """If a function of the target alone made the result, record this function."""
        known = [self._made_from_target.get(tensor) for tensor in taken]
        if not isinstance(result, Tensor) or not any(known):
            return
        from_batch = any(one is None and self._tags.get(tensor) for one, tensor in zip(known, taken, strict=True))
        if from_batch:
            return
        makers: Mapping[int, Any] = {
            id(tensor): one for tensor, one in zip(taken, known, strict=True) if one is not None
        }
        self._made_from_target[result] = _Function(
            func, pytree.tree_map_only(Tensor, lambda tensor: makers.get(id(tensor), tensor), (args, kwargs))
        )

    # ---- rules --------------------------------------------------------------------------------------------------

    def _tag_of(self, call: "_TaggedCall") -> _Tag:
        known = [tag for tag in call.tags if tag is not None]
        unclear = next((tag for tag in known if isinstance(tag, Unclear)), None)
        if unclear is not None:
            return unclear
        reduced = [tag for tag in known if isinstance(tag, Reduced)]
        if len(reduced) == len(known):
            return self._of_reduced(call, reduced)
        if reduced:
            return Unclear(f"{call} of a {reduced[0].reduction} and of single rows")
        values = _least([tag for tag in known if not isinstance(tag, Reduced | Unclear)])
        if "reduction" in _parameters(call.func):
            return self._of_torch_loss(call, values)
        return _of_reduction(call, values) if call.name in ("mean", "sum") else _of_rows(call, values)

    def _of_reduced(self, call: "_TaggedCall", reduced: Sequence[Reduced]) -> _Tag:
        """Return the tag of a function of means or sums, and perhaps of constants."""
        kinds = sorted({one.reduction for one in reduced})
        joined = Reduced(reduced[0].reduction, _NO_WEIGHTS.union(*(one.weights for one in reduced)))
        if call.name in _JOINS and len(kinds) == 1:
            return _joined(call, joined)
        scales = call.name in _MULTIPLIES or (call.name in _DIVIDES and call.tags[0] is reduced[0])
        if scales and len(reduced) == 1:
            return self._scaled(call, joined)
        return Unclear(f"{call} of a {' and a '.join(kinds)} over rows")

    def _scaled(self, call: "_TaggedCall", reduced: Reduced) -> _Tag:
        """Return the tag of a mean or a sum that is multiplied or divided by a constant."""
        number = call.number
        if number == 0 and call.name in _MULTIPLIES:
            return Reduced("mean")
        if reduced.reduction == "sum" and number != 1:
            return Unclear(f"{call} of a sum over rows and a number, which may be the number of rows")
        if number is not None and abs(number) != 1 and {number, 1 / number if number else 0} & self._sizes:
            return Unclear(f"{call} of a mean and {number}, which may be the number of rows")
        return reduced

    def _of_torch_loss(self, call: "_TaggedCall", values: _Values) -> _Tag:
        """Return the tag of a loss function of torch."""
        given = inspect.signature(call.func).bind(*call.args, **call.kwargs)
        given.apply_defaults()
        options = {name: value for name, value in given.arguments.items() if name != "input"}
        kind = stated_reduction(options.get)
        if kind == "none":
            return values
        if kind == "sum":
            return Reduced("sum")
        if values == "selected" or (kind == "batchmean" and values != "rows"):
            return Unclear(f"{call} of selected or reordered values")
        return self._of_labels(call, options.pop("target", None), options)

    def _of_labels(self, call: "_TaggedCall", labels: Any, options: Mapping[str, Any]) -> _Tag:
        """Return the tag of a mean loss of torch, which may count only some labels, or weight them."""
        count = counting(call.name, options)
        if count is None or not isinstance(labels, Tensor):
            return Reduced("mean", _ROWS)
        make = self._made_from_target.get(labels)
        if make is not None:
            return Reduced("mean", frozenset([Counted(call.name, make, options)]))
        if self._tags.get(labels) is None and float(count(labels)) == labels.numel():
            return Reduced("mean", _ROWS)  # labels that the loss makes itself, such as torch.arange
        return Unclear(f"{call}, whose labels are not a function of the target alone")


@dataclass(frozen=True)
class _TaggedCall:
    """A call of a torch function, with the tags of its tensor arguments."""

    func: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    taken: Sequence[Tensor]
    tags: Sequence[_Tag | None]
    result: Any

    @property
    def number(self) -> float | None:
        """The plain number among the arguments; None if there is none."""
        given = (*self.args, *self.kwargs.values())
        plain = [one for one in given if isinstance(one, int | float) and not isinstance(one, bool)]
        return plain[0] if plain else None

    @property
    def source(self) -> Tensor:
        """The first tensor among the arguments that depends on the rows."""
        return next(tensor for tensor, tag in zip(self.taken, self.tags, strict=True) if tag is not None)

    def __str__(self) -> str:
        symbols = {
            "mul": "*",
            "rmul": "*",
            "truediv": "/",
            "div": "/",
            "add": "+",
            "radd": "+",
            "sub": "-",
            "rsub": "-",
        }
        name = self.name.strip("_")
        return symbols.get(name, f"{name}()")


@dataclass(frozen=True)
class _TargetLeaf:
    """Returns a tensor of the target."""

    place: int

    def __call__(self, target: Any) -> Any:
        return pytree.tree_leaves(target)[self.place]


class _Function:
    """Makes a tensor from the target, by calling the function that made it in the first call of the loss.

    In ``given``, the arguments of this call, functions of the target take the place of tensors that depend on it.
    """

    def __init__(self, func: Callable[..., Any], given: tuple[Any, Any]) -> None:
        self._func = func
        self._given = given

    def __call__(self, target: Any) -> Any:
        args, kwargs = pytree.tree_map_only(_TargetLeaf | _Function, lambda make: make(target), self._given)
        return self._func(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Function) and self._func is other._func and _alike(self._given, other._given)

    def __hash__(self) -> int:
        return hash(self._func)


@dataclass(frozen=True, eq=False)
class Counted:
    """Computes the divisor of a torch mean loss from the target that is passed to the user's loss function."""

    name: str
    #: Returns the labels that the torch loss takes.
    labels: Callable[[Any], Any]
    options: Mapping[str, Any]

    @torch.no_grad()
    def __call__(self, target: Any) -> Any:
        count = counting(self.name, self.options)
        assert count is not None  # else the weight would be the number of rows
        return count(self.labels(target))

    @torch.no_grad()
    def counts_all(self, target: Any) -> bool:
        """Return whether the divisor is the number of labels, as without ignored labels and weights of classes."""
        return self.options.get("weight") is None and float(self(target)) == self.labels(target).numel()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counted) and _alike(self._key(), other._key())

    def __hash__(self) -> int:
        return hash((self.name, self.labels))

    def _key(self) -> Any:
        return self.name, self.labels, dict(self.options)


#: The weight of a micro-batch: a function of its target; None for the number of its rows.
Weight = Counted | None
_NO_WEIGHTS: frozenset[Weight] = frozenset()
_ROWS: frozenset[Weight] = frozenset([None])


def _alike(one: Any, other: Any) -> bool:
    """Return whether two structures are equal. Tensors are equal if they are the same object."""
    ones, others = pytree.tree_flatten(one), pytree.tree_flatten(other)
    pairs = zip(ones[0], others[0], strict=False)
    return ones[1] == others[1] and all(a is b or (not isinstance(a, Tensor) and a == b) for a, b in pairs)


def _joined(call: _TaggedCall, joined: Reduced) -> _Tag:
    """Return the tag of a sum of means, of a sum of sums, or of a mean or a sum in another form."""
    constant = call.name in _ADDS and (None in call.tags or call.number not in (None, 0))
    if joined.reduction == "sum" and constant:
        return Unclear(f"{call} of a sum over rows and a term that does not depend on the rows")
    if joined.reduction == "sum" and call.name == "mean":
        return Unclear("mean() of sums over rows")
    return joined


def _of_reduction(call: _TaggedCall, values: _Values) -> _Tag:
    """Return the tag of ``mean`` or ``sum`` of values of rows."""
    tensor = call.taken[0]
    dim = call.kwargs.get("dim", call.kwargs.get("axis", call.args[1] if len(call.args) > 1 else None))
    every = range(tensor.dim())
    dims = every if dim is None or isinstance(dim, torch.dtype) else [dim] if isinstance(dim, int) else dim
    reduces = {one % tensor.dim() if tensor.dim() else 0 for one in dims} or set(every)
    same: _Values = "means" if call.name == "mean" else "sums"
    other: _Values = "sums" if call.name == "mean" else "means"
    if values == other or (values == "selected" and call.name == "mean"):
        return Unclear(f"{call} of {values if values == other else 'selected values'}")
    if tensor.dim() and len(reduces) < tensor.dim() and (values != "rows" or 0 not in reduces):
        return values if values in ("rows", "selected") else same
    return Reduced("sum") if call.name == "sum" else Reduced("mean", _ROWS)


def _of_rows(call: _TaggedCall, values: _Values) -> _Tag:
    """Return the tag of any other function of values of rows."""
    made = next(tensors_in(call.result), None)
    source = call.source
    if made is None or values == "selected":
        return values if made is None or made.shape == source.shape else Unclear(f"{call} of selected values")
    if call.name in _STACKS and None not in call.tags and values in ("rows", "elements"):
        along_rows = made.dim() != source.dim() or made.shape[:1] != source.shape[:1]
        equal = len({one.shape for one in call.taken}) == 1  # entries of a list may differ
        return values if not along_rows else "elements" if equal else "selected"
    if call.name in _MOVES_DIMS | _RESHAPES:
        return values if values != "rows" or _leaves_rows(call, made, source) else "elements"
    if call.name in _SELECTS:
        return _of_index(call, values)
    if call.name in _MATRIX_PRODUCTS and call.tags[0] == "rows":
        source, values = call.taken[0], "rows"
    same = made.shape[:1] == source.shape[:1] if values == "rows" else made.shape == source.shape
    return values if same else Unclear(f"{call}, which combines or leaves out rows")


def _leaves_rows(call: _TaggedCall, made: Tensor, source: Tensor) -> bool:
    """Return whether dim 0 has the rows after a function that moves or reshapes dims."""
    plain = [one for one in (*call.args[1:], *call.kwargs.values()) if isinstance(one, int)]
    if call.name in _MOVES_DIMS:
        swaps = call.name in ("transpose", "swapaxes", "swapdims")
        return swaps and 0 not in {one % source.dim() for one in plain}
    if call.name == "unsqueeze" and 0 in {one % made.dim() for one in plain}:
        return False
    return bool(made.dim() and source.dim() and source.shape[0] and not made.shape[0] % source.shape[0])


def _of_index(call: _TaggedCall, values: _Values) -> _Tag:
    """Return the tag of an indexing. Only an index that leaves dim 0 as it is keeps all rows."""
    index = call.args[1] if call.name == "__getitem__" else call.taken[-1]
    first, *rest = index if isinstance(index, tuple) and index else (index,)
    if isinstance(first, Tensor) and first.dtype is torch.bool:
        return "selected"
    whole = first is Ellipsis or (isinstance(first, slice) and first in (slice(None), slice(0, None)))
    if whole and values == "rows" and not (first is Ellipsis and len(rest) >= call.source.dim()):
        return values
    return Unclear("an index that selects rows")


def _least(values: Iterable[_Values]) -> _Values:
    """Return what holds for values of all these kinds."""
    order: tuple[_Values, ...] = ("selected", "sums", "means", "elements", "rows")
    return min(values, key=order.index)


def _parameters(func: Any) -> Iterable[str]:
    of_torch = getattr(functional, getattr(func, "__name__", ""), None) is func and inspect.isfunction(func)
    if not of_torch and func not in LOSSES:
        return ()
    return inspect.signature(func).parameters


def _differentiated(func: Any, args: Any, kwargs: Any) -> Any:
    """Call torch.autograd.grad for code of a loss. Raises InputError if the derivative is not known to the loss."""
    remedy = (
        "compute such a derivative in the model, in one submodule with the layers that it differentiates through, and "
        "return it beside the output (docs/howto/loss-functions.md)"
    )
    if func is not torch.autograd.grad:
        raise InputError(f"loss_fn must return the loss, and must not call {func.__name__}() itself; {remedy}")
    try:
        result = func(*args, **kwargs)
    except RuntimeError as error:
        if not str(error).startswith("One of the differentiated Tensors"):
            raise
        raise InputError(
            f"loss_fn may differentiate only by tensors that it makes itself or by the output, because the layers ran "
            f"before, some of them elsewhere; torch.autograd.grad failed in loss_fn ({error}); {remedy}"
        ) from error
    if any(one is None for one in result):
        raise InputError(
            f"loss_fn may differentiate only by tensors that it makes itself or by the output, because the layers ran "
            f"before, some of them elsewhere; torch.autograd.grad found no derivative by one of its inputs; {remedy}"
        )
    return result
