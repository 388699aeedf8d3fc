"""Layout trace: follows through a model which activations are divided, and refuses layers that get other blocks.

Many wrong styles give tensors of fitting shapes, and wrong numbers. So a pipeline runs a split model once, without
contents, in a `LayoutTrace`. The divided layers say what they get and what they return. The result of any other
function is divided as its arguments are.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from pipesched.errors import InputError, PipeschedError
from pipesched.parallel.axis_groups import AxisGroups
from pipesched.parallel.divided_outputs import DividedOutputs
from pipesched.parallel.tensor_group import ActivationLayout, TensorGroup
from pipesched.tensors.payload import pytree

__all__ = ["LayoutTrace"]

_WHOLE, _OUTER, _INNER = ActivationLayout.WHOLE, ActivationLayout.OUTER, ActivationLayout.INNER

_ARE = {
    _WHOLE: "whole",
    _OUTER: "blocks as between pairs of linear layers",
    _INNER: "blocks as inside a pair of linear layers",
    ActivationLayout.DIVIDED: "divided by columns",
}
_NO_BEGIN = "give the style 'begin' to a module before it, or 'vocabulary' to the embedding"
_REMEDIES = {
    (_OUTER, _WHOLE): _NO_BEGIN,
    (_OUTER, _INNER): "give the style 'row' to the second linear layer of each pair, or 'summed' to a norm of heads",
    (_INNER, _WHOLE): f"give the style 'column' to the linear layer before it, and {_NO_BEGIN}",
    (_INNER, _OUTER): "give the style 'column' to the linear layer before it",
    (_WHOLE, _OUTER): "give the style 'begin' to one module, or 'end' to a module before this one",
    (_WHOLE, _INNER): "give the style 'begin' to one module, or 'end' to a module before this one",
}
_NO_HEAD = "give the head the style 'vocabulary', or use nn.CrossEntropyLoss for whole logits"

#: Functions whose result has the dtype or the shape of their second argument, but not its rows.
_LIKE = frozenset({"to", "type_as", "expand_as", "view_as", "reshape_as"})
#: Functions that join rows or hidden units, with the place and the default of their dimensions.
_JOINS: dict[str, tuple[int, int | None]] = dict.fromkeys(
    ("mean", "sum", "softmax", "log_softmax", "var", "std", "amax", "amin"), (1, None)
)
_JOINS |= {"logsumexp": (1, None), "normalize": (2, 1), "norm": (2, None)}
_NORMS = (functional.layer_norm, functional.rms_norm, functional.batch_norm, functional.group_norm)


class LayoutTrace(TorchFunctionMode):
    """Follows which tensors are divided among the ranks of a tensor group, in a ``with`` block.

    Args:
        group: the tensor group, whose layers tell this trace what they get and return.

    """

    def __init__(self, group: TensorGroup) -> None:
        super().__init__()
        self._group = group
        #: The layout of each divided tensor, and the shape with which a layer returned it.
        self._found: Any = WeakTensorKeyDictionary()
        self._after = "the beginning of the model"
        #: Whether a divided layer runs, which knows what its functions join.
        self._inside = False
        self._noted = 0

    def __enter__(self) -> "LayoutTrace":
        self._group.trace = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._group.trace = None

    def of(self, tensor: Tensor) -> ActivationLayout:
        """Return the layout of a tensor."""
        layout: ActivationLayout = self._found.get(tensor, (_WHOLE, ()))[0]
        return layout

    def note(self, tensor: Any, layout: ActivationLayout, name: str) -> None:
        """Note the layout of the output of the layer ``name``."""
        self._inside = False
        self._noted += 1
        self._after = repr(name) if name else self._after
        for each in _tensors(tensor):
            if layout is _WHOLE:
                self._found.pop(each, None)
            else:
                self._found[each] = layout, tuple(each.shape)

    def expect(self, tensor: Tensor, layout: ActivationLayout, name: str) -> None:
        """Raise InputError if the input of the layer ``name`` has another layout than it expects.

        Until the layer notes its output, its functions are not followed.
        """
        self._inside = True
        found = self.of(tensor)
        if self._differ(found, layout):
            raise InputError(
                f"a layer that tensor_parallel= divides must get activations that are {_ARE[layout]}; {name!r} gets "
                f"activations of shape {list(tensor.shape)} that are {_ARE[found]}; in tensor_parallel=, "
                f"{_REMEDIES[layout, found]}"
            )

    def expect_logits(self, *outputs: Any) -> None:
        """Raise InputError if none of the tensors are logits as `VocabularyCrossEntropy` takes them."""
        self._inside = True
        due = ActivationLayout.DIVIDED if self._group.grid is None else _INNER
        tensors = [*_tensors(outputs)]
        found = [self.of(tensor) for tensor in tensors]
        if all(self._differ(layout, due) for layout in found):
            raise InputError(
                f"a VocabularyCrossEntropy beside tensor_parallel= must get logits whose classes are divided; it gets "
                f"tensors of shape {_shapes(tensors)} that are {' and '.join(_ARE[layout] for layout in {*found})}; "
                f"{_NO_HEAD}"
            )

    def divided(self, output: Any) -> DividedOutputs:
        """Return which leaves of the model's output are divided, and how."""
        blocks = {}
        for place, leaf in enumerate(pytree.tree_leaves(output)):
            if isinstance(leaf, Tensor) and leaf.dim() and leaf in self._found:
                layout, shape = self._found[leaf]
                dim = -1 if leaf.shape[-1] == shape[-1] else 1  # classes may have been moved to dim 1
                blocks[place] = layout, dim
        return DividedOutputs(self._group, blocks)

    def expect_whole(self, *outputs: Any) -> None:
        """Raise InputError if one of the model's outputs is divided, but not by the classes alone."""
        for tensor in _tensors(outputs):
            if self.of(tensor) is not _WHOLE:
                raise InputError(
                    f"the outputs of a model must be whole, unless VocabularyCrossEntropy takes them; an output of "
                    f"shape {list(tensor.shape)} is {_ARE[self.of(tensor)]}, after {self._after}; give the style 'end' "
                    f"to the last module before the output, or to an nn.Identity there"
                )

    def _differ(self, one: ActivationLayout, other: ActivationLayout) -> bool:
        grid = self._group.grid
        if one is other:
            return False
        if not isinstance(grid, AxisGroups) or {one, other} != {_OUTER, _INNER}:
            return True
        return grid.blocks(one) != grid.blocks(other)

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        given = [*_tensors(args[:1] if name in _LIKE else (args, kwargs))]
        divided = [self._found[tensor] for tensor in given if tensor in self._found]
        if not divided or name.startswith("new_"):
            return func(*args, **kwargs)
        layouts = {layout for layout, _ in divided}
        if len(layouts) > 1 and self._differ(*layouts):
            raise self._error(
                f"activations inside a pair of linear layers have other rows on each rank than those between pairs; "
                f"{name!r} joins both",
                "give the style 'row' to the second linear layer of each pair",
            )
        if self._group.grid is not None and _joins(func, name, args, kwargs, divided[0]):
            raise self._error(
                f"rows and hidden units that are divided must not meet outside of divided layers; {name!r} computes "
                f"with those of this rank only",
                "give a norm the style 'norm', or give the style 'end' to a module before",
            )
        noted = self._noted
        result = self._called(func, name, given, args, kwargs)
        if self._noted != noted:  # the function is a divided layer
            return result
        for tensor in [args[0]] if result is None and isinstance(args[0], Tensor) else _tensors(result):
            self._found[tensor] = max(divided, key=lambda one: one[0] is _INNER)
        return result

    def _called(
        self, func: Callable[..., Any], name: str, given: list[Tensor], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        blocks = [tensor for tensor in given if tensor in self._found]
        others = [tensor for tensor in given if tensor not in self._found and tensor.dim()]
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if self._group.grid is None or not others or isinstance(error, PipeschedError):
                raise
            raise self._met(name, blocks, others) from error
        grows = isinstance(result, Tensor) and any(
            len(block) == 1 and len(result) > 1 and any(len(other) == len(result) for other in others)
            for block in blocks
            if block.dim() == result.dim() > 1
        )
        if grows and self._group.grid is not None and name not in ("cat", "concat", "expand", "index_select"):
            raise self._met(name, blocks, others)
        return result

    def _met(self, name: str, blocks: list[Tensor], others: list[Tensor]) -> InputError:
        return self._error(
            f"a tensor that meets divided activations must have the shape of this rank's block, or the same values for "
            f"all rows and hidden units; {name!r} joins blocks of shape {_shapes(blocks)} with whole tensors of shape "
            f"{_shapes(others)}",
            "divide activations with the style 'begin' and a table of positions with 'heads', pass a tensor that is "
            "the same for all rows with 1 row",
        )

    def _error(self, text: str, remedy: str) -> InputError:
        return InputError(f"{text}, after {self._after}; {remedy}, or pass tensor_layout='1d'")


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _shapes(tensors: list[Tensor]) -> str:
    return ", ".join(str(list(tensor.shape)) for tensor in tensors)


def _joins(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], divided: tuple[ActivationLayout, Any]
) -> bool:
    """Return whether a function joins rows or hidden units of activations that lie between pairs."""
    layout, shape = divided
    x = args[0] if args else kwargs.get("input")
    if layout is not _OUTER or not isinstance(x, Tensor) or tuple(x.shape) != shape:
        return False
    if func in _NORMS:
        return True
    if name not in _JOINS or (len(shape) == 3 and shape[1] == shape[2]):  # transposed, perhaps
        return False
    place, default = _JOINS[name]
    dims = kwargs.get("dim", args[place] if len(args) > place else default)
    dims = range(x.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    return any(isinstance(dim, int) and dim % x.dim() in (0, x.dim() - 1) for dim in dims) and math.prod(shape) > 0
