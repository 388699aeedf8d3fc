"""Meta tensors: runs code in which some tensors are on the meta device and therefore have no values.

Results computed only from the model's inputs have values, so code that reads masks or lengths runs as usual. Results
computed with meta weights have no values.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipesched.devices.streams import used_here
from pipesched.devices.transfers import MOVES
from pipesched.errors import GraphError
from pipesched.tensors.payload import pytree
from pipesched.tensors.tensor_contents import set_data, swap_in
from pipesched.tensors.torch_functions import is_shaped_by_contents, name_of, only_looked_at
from pipesched.tensors.torch_insides import base_of, forget_weights
from pipesched.tensors.tree_structure import map_tensors, tensors_in

__all__ = [
    "Beside",
    "apart",
    "call_beside",
    "give_contents",
    "is_expanded",
    "lacks_contents",
    "look_of",
    "put_away",
    "put_on",
    "stand_in",
    "weights_replaced",
    "with_look_of",
    "without_values",
]

_META = torch.device("meta")
_DEVICE = Tensor.device.__get__


def lacks_contents(module: nn.Module) -> bool:
    """Return whether any parameter or buffer of the module is on the meta device."""
    return any(tensor.is_meta for tensor in _tensors_of(module))


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def is_expanded(tensor: Tensor) -> bool:
    """Return whether several elements of a tensor share one address. Such a tensor cannot be written to."""
    steps = tensor.stride() if tensor.layout == torch.strided else ()
    return any(step == 0 and size > 1 for size, step in zip(tensor.shape, steps, strict=False))


def give_contents(tensor: Tensor, full: Tensor) -> None:
    """Give a meta tensor the values of ``full``. The meta tensor stays the same object with the same attributes."""
    try:
        swap_in(tensor, full)
    except RuntimeError as error:
        raise GraphError(
            f"a model on the meta device must not keep views of its weights, because the weights are filled in place; "
            f"the model keeps views of a weight of shape {list(tensor.shape)}, which would stay empty ({error}); "
            f"create the views in the forward"
        ) from error


def apart(value: Any) -> Any:
    """Replace the meta tensors in a value with new meta tensors, because the old ones may be views of weights."""
    return map_tensors(lambda tensor: torch.empty_like(tensor) if tensor.is_meta else tensor, value)


def put_on(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device. Meta tensors, such as weights that another rank will send, become zeros."""
    elsewhere = [tensor for tensor in _tensors_of(module) if tensor.device != device]
    for part in module.modules() if elsewhere else ():
        if isinstance(part, nn.RNNBase):
            forget_weights(part)  # `to` creates the weak references again
    for tensor in elsewhere:
        if tensor.is_meta:
            give_contents(tensor, torch.zeros_like(tensor, device=device, requires_grad=False))
        else:  # torch's `to` replaces the Parameters on some devices, and so unties them
            set_data(tensor, tensor.detach().to(device))
    if elsewhere:  # `to` also updates attributes of modules such as RNNs
        module.to(device)


def put_away(module: nn.Module, places: Mapping[Tensor, torch.device]) -> None:
    """Move some tensors of a module to their places, and drop their gradients. On the meta device they have no values.

    ``places`` maps these tensors to devices. The memory that they had may be used again. A tensor to which other code
    has weak references, such as compiled code, cannot go to the meta device, and goes to the CPU instead.
    """
    leaving = [tensor for tensor in _tensors_of(module) if tensor in places]
    with weights_replaced(module, leaving):
        for tensor in leaving:
            tensor.grad = None
            if tensor.device != places[tensor]:
                used_here(tensor.detach())  # another stream may have allocated it
                try:
                    set_data(tensor, tensor.detach().to(places[tensor]))
                except RuntimeError:
                    set_data(tensor, tensor.detach().cpu())


@contextmanager
def weights_replaced(module: nn.Module, tensors: Iterable[Tensor]) -> Iterator[None]:
    """Let these tensors of a module get other data in this block. Recurrent modules have weak references to theirs."""
    replaced = {*tensors}
    recurrent = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
    recurrent = [part for part in recurrent if not replaced.isdisjoint(part.parameters())]
    for part in recurrent:
        forget_weights(part)
    yield
    for part in recurrent:
        devices = {parameter.device for parameter in part.parameters()}
        if len(devices) == 1:  # otherwise `to` would replace Parameters
            part.to(devices.pop())  # creates the references again


def stand_in(tensor: Tensor, device: torch.device | str = "cpu", *, weight: bool = False) -> Tensor:
    """Return a tensor with valid values in place of a meta tensor; return any other tensor unchanged.

    Weights get small positive numbers, and integer tensors get zeros, which are valid indices. All rows of other
    floating-point tensors are identical.
    """
    if not tensor.is_meta:
        return tensor
    made = torch.empty_like(tensor, device=device)
    if not made.is_floating_point():
        return made.fill_(made.dtype == torch.bool)
    generator = torch.Generator(device).manual_seed(0)
    if weight:
        return made.uniform_(0.01, 0.05, generator=generator)
    return made.copy_(torch.empty(made.shape[1:], dtype=made.dtype, device=device).normal_(generator=generator))


def look_of(tensor: Tensor) -> tuple[torch.dtype, tuple[int | None, ...]]:
    """Return the dtype and the shape of a tensor. The size of the jagged dimension of a nested tensor is None."""
    if not tensor.is_nested:
        return tensor.dtype, tuple(tensor.shape)
    return tensor.dtype, tuple([size if type(size) is int else None for size in tensor.shape])


def with_look_of(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor with the dtype and the shape of another tensor, which takes no memory."""
    return torch.empty((), dtype=tensor.dtype, device=device).expand(tensor.shape)


def without_values(dtype: torch.dtype, shape: Sequence[int | None]) -> Tensor:
    """Return a tensor on the meta device with a dtype and a shape from ``look_of``."""
    sizes = [0 if size is None else size for size in shape]
    if None not in shape:
        return torch.empty(sizes, dtype=dtype, device=_META)
    rows, *others = sizes
    values = torch.empty(others, dtype=dtype, device=_META)
    offsets = torch.empty(rows + 1, dtype=torch.long, device=_META)
    made: Tensor = torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=shape.index(None))
    return made


class Beside(TorchFunctionMode):
    """Lets torch functions mix meta tensors with other tensors: converts the other tensors to meta tensors.

    ``claimed`` is the device that a meta tensor reports. Raises GraphError if code reads the values of a meta tensor.
    """

    def __init__(self, claimed: torch.device) -> None:
        super().__init__()
        self._claimed = claimed
        #: id of a tensor that got unknown values in place -> the tensor, and the meta tensor used instead
        self._unknown: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._unknown:
            args, kwargs = map_tensors(lambda one: self._unknown.get(id(one), (one, one))[1], (args, kwargs))
        tensors = list(tensors_in((args, kwargs)))
        if func == _DEVICE and tensors[0].is_meta:
            return self._claimed
        if any(tensor.is_meta for tensor in tensors):
            args, tensors = self._with_looks(func, args, tensors)
        if not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        try:
            return _apply(func, args, kwargs, _without_bounds(tensors, (args, kwargs)), self._unknown)
        except (RuntimeError, TypeError) as error:
            raise GraphError(
                f"a model on the meta device must run without the values of its weights; the model's code calls "
                f"{getattr(func, '__name__', func)} on a value computed from the weights ({error}); move that code "
                f"into a layer, or build the model on a real device instead of meta"
            ) from error

    def _with_looks(self, func: Any, args: Any, tensors: list[Tensor]) -> tuple[Any, list[Tensor]]:
        """Replace a meta tensor that a function only asks for its shape. The function's result can then have values."""
        place = only_looked_at(name_of(func), args)
        if place is None or not args[place].is_meta or args[place].layout != torch.strided:
            return args, tensors
        look = with_look_of(args[place], self._claimed)
        replaced = [look if one is args[place] else one for one in tensors]
        return (*args[:place], look, *args[place + 1 :]), replaced


def _without_bounds(tensors: Sequence[Tensor], arguments: Any) -> list[Tensor]:
    """Return the tensors with values, except the bounds of slices, which must keep their values."""
    slices = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, slice)]
    bounds = {id(one) for one in tensors_in(slices)}
    return [one for one in tensors if not one.is_meta and id(one) not in bounds]


#: The tensors that got unknown values in place, but cannot become meta tensors; see ``Beside``.
_Unknown = dict[int, tuple[Tensor, Tensor]]


def _apply(func: Callable[..., Any], args: Any, kwargs: Any, full: list[Tensor], unknown: _Unknown) -> Any:
    if func in MOVES:
        return _transferred(func, args, kwargs)
    if not full:
        return _without_contents(func, args, kwargs)
    try:
        return _on_meta(func, args, kwargs, full, unknown)
    except NotImplementedError:
        try:
            return func(*args, **kwargs)  # the result's shape depends on values that exist, such as a mask
        except NotImplementedError:
            return _without_contents(func, args, kwargs)
    except RuntimeError:
        if all(tensor.dim() for tensor in full):
            raise
        sized = [tensor for tensor in full if tensor.dim()]  # a tensor without dimensions is a number, such as a size
        return _on_meta(func, args, kwargs, sized, unknown)


def _on_meta(func: Callable[..., Any], args: Any, kwargs: Any, full: Sequence[Tensor], unknown: _Unknown) -> Any:
    """Call a function with meta copies of the tensors ``full``."""
    copies = {id(tensor): tensor.to(_META) for tensor in full}
    versions = {key: copy._version for key, copy in copies.items()}
    there = map_tensors(lambda tensor: copies.get(id(tensor), tensor), (args, kwargs))
    result = func(*there[0], **there[1])
    changed = [(tensor, copies[id(tensor)]) for tensor in full if copies[id(tensor)]._version != versions[id(tensor)]]
    return _with_changes(result, changed, unknown)


def _without_contents(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function with meta tensors. If torch has no meta kernel of it, call it with stand-ins for them."""
    try:
        return func(*args, **kwargs)
    except NotImplementedError:
        name = name_of(func)
        leaves = list(tensors_in((args, kwargs)))
        has_mask = any(leaf.dtype is torch.bool and not leaf.is_meta for leaf in leaves)  # for ``masked_select``
        if name.endswith("_") or (is_shaped_by_contents(name, args) and not has_mask):
            raise
        trains = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
        args, kwargs = map_tensors(stand_in, (args, kwargs))
        result = func(*args, **kwargs)

        def emptied(one: Tensor) -> Tensor:
            return one.detach().to(_META).requires_grad_(trains and one.is_floating_point())

        return map_tensors(emptied, result)


def _with_changes(result: Any, changed: Iterable[tuple[Tensor, Tensor]], unknown: _Unknown) -> Any:
    """Turn tensors that the call changed in place into meta tensors, because their new values are unknown."""
    back = {}
    for tensor, copy in changed:
        if base_of(tensor) is not None:
            raise RuntimeError(
                "cannot write values computed on the meta device into a view of a tensor with real values, because "
                "the tensor's values would be lost"
            )
        try:
            torch.utils.swap_tensors(tensor, copy)
        except RuntimeError:  # other code, such as the graph, refers to the tensor
            unknown[id(tensor)] = tensor, copy
            continue
        back[id(copy)] = tensor
    return map_tensors(lambda tensor: back.get(id(tensor), tensor), result) if back else result


def _transferred(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``Tensor.to``, ``cpu`` or the method of an accelerator so that a meta tensor stays on the meta device.

    All but ``to`` return the tensor unchanged. ``to(other)`` converts only the dtype.
    """
    tensor = args[0]
    if func is not Tensor.to:
        return tensor

    def staying(given: Any) -> Any:
        if isinstance(given, Tensor) and given is not tensor:
            return given.dtype
        is_device = isinstance(given, str | int | torch.device) and not isinstance(given, bool)
        return _META if tensor.is_meta and is_device else given

    named = {"dtype" if key == "tensor" else key: staying(value) for key, value in kwargs.items()}
    return func(*map(staying, args), **named)


def call_beside(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], again: Callable[[], tuple[Any, Any]]
) -> Any:
    """Call a layer that may use meta tensors. If the call fails, repeat it with stand-ins for the meta tensors.

    ``again`` returns the arguments as they were before the call.
    """
    given = tensors_in((args, kwargs))
    if not any(tensor.is_meta for tensor in (*given, *_tensors_of(layer))):
        return layer(*args, **kwargs)
    try:
        with Beside(_META):
            return layer(*args, **kwargs)
    except Exception:
        own = {name: stand_in(tensor, weight=True) for name, tensor in layer.named_parameters()}
        own |= {name: stand_in(tensor, weight=True) for name, tensor in layer.named_buffers()}
        args, kwargs = map_tensors(stand_in, again())
        result = torch.func.functional_call(layer, own, args, kwargs)
        return map_tensors(lambda tensor: tensor.to(_META), result)
