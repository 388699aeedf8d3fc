"""Initialization: fills a model on the meta device; each rank creates only the weights of its own stages.

A model of any size is built and captured on the meta device, and cut into stages. Then each rank creates the weights of
its own stages. The random numbers for a module's weights are seeded with the seed and the module's name. The weights
are therefore bit-identical for every cut, whichever rank creates them. If ranks divide a weight among themselves, each
of these ranks creates the whole weight, keeps its block, and frees the rest before it creates the next layer.
"""

import hashlib
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from pipesched.checks import shown
from pipesched.devices.generators import generators_kept
from pipesched.errors import GraphError, InputError, ModelTypeError
from pipesched.model.containers import find_layers
from pipesched.model.module_tree import is_in_a_row, layers_of
from pipesched.model.safetensors_files import WeightFiles
from pipesched.model.weight_owners import Owners
from pipesched.tensors.exchange import RankDevices
from pipesched.tensors.meta_tensors import give_contents, lacks_contents
from pipesched.tensors.torch_insides import forget_weights, hooks_on, reset_of
from pipesched.torch_checks import as_function

__all__ = ["Init", "Initial", "built", "check_model"]

#: The source of weights: "reset", a function that fills a module, tensors by name, or safetensors files.
Init = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, Tensor] | Callable[[nn.Module], Any]

_RESET = "reset"
_SHOWN = 5


# ---- building without weights -----------------------------------------------------------------------------------


def check_model(model: Any) -> None:
    """Raise ModelTypeError unless the model is a module or a function without arguments."""
    if isinstance(model, nn.Module):
        return
    try:
        inspect.signature(model).bind()
    except (TypeError, ValueError):  # ValueError: a built-in class without a signature
        raise ModelTypeError(
            f"the model must be an nn.Module, or a function without arguments that builds one; got "
            f"{type(model).__name__}; pass the module, or a function that builds it"
        ) from None


def built(model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a model whose parameters are on the meta device and whose buffers have values.

    If ``model`` is already a module, returns the module unchanged. Each parameter moves to the meta device as soon as a
    module registers it, so at most one parameter at a time uses memory. Random numbers for buffers depend only on the
    seed. Raises ModelTypeError if the function does not return a module.
    """
    if isinstance(model, nn.Module):
        return model
    handle = register_module_parameter_registration_hook(_Emptying())  # type: ignore[arg-type]  # returns a parameter
    try:
        with _drawing(seed, "buffers"):
            made = model()
    finally:
        handle.remove()
    if not isinstance(made, nn.Module):
        raise ModelTypeError(
            f"a function that builds the model must return an nn.Module; {model!r} returned {type(made).__name__}; "
            f"pass the module, or a function that returns it"
        )
    return made


class _Emptying:
    """Hook that moves parameters registered in this thread to the meta device. Shared parameters stay shared."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._known: dict[int, tuple[weakref.ref[Tensor], nn.Parameter]] = {}

    def __call__(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or threading.get_ident() != self._thread:
            return None
        known = self._known.get(id(parameter))
        if known is None or known[0]() is not parameter:
            empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            empty.__dict__.update(parameter.__dict__)
            known = self._known[id(parameter)] = weakref.ref(parameter), empty
        return known[1]


@contextmanager
def _drawing(seed: int, name: str) -> Iterator[None]:
    """Seed the CPU generator with ``seed`` and ``name``, and restore its state after the ``with`` block."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}/init/{name}".encode(), digest_size=8).digest(), "little") >> 1
    with generators_kept([]):
        torch.default_generator.manual_seed(key)
        yield


# ---- filling ------------------------------------------------------------------------------------------------------


class WeightBlocks(Protocol):
    """The weights of which this process holds only blocks, by their names in the model."""

    def __contains__(self, name: object) -> bool: ...

    def own(self, name: str, whole: Tensor) -> Tensor:
        """Return this process's block of a whole weight. The block may be a view."""

    def whole_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a whole weight, given that of the block."""


class Initial:
    """Fills a model on the meta device.

    Args:
        model: the user's module.
        init: the source of weights, as for ``Pipeline``; None means "reset".
        seed: seed of the random numbers.
        loss_fn: the loss, which must not be on the meta device.

    Raises:
        InputError: ``init`` is not None but the model has no meta tensors, or names or shapes do not fit the model.
        GraphError: parameters on the meta device have hooks, or the loss module is on the meta device.

    """

    def __init__(self, model: nn.Module, init: Init | None, seed: int, loss_fn: Any = None) -> None:
        self._model = model
        self.seed = seed
        self._empty = lacks_contents(model)
        if init is not None and not self._empty:
            raise InputError(
                f"init= requires a model on the meta device; this {type(model).__name__} has no meta weights; "
                f"build the model under torch.device('meta'), pass a function that builds it, or use load_state_dict"
            )
        if isinstance(loss_fn, nn.Module) and lacks_contents(loss_fn):
            raise GraphError(
                f"the loss module must not be on the meta device, because init= fills only the model's stages; the "
                f"loss module {type(loss_fn).__name__} is on the meta device; build it outside torch.device('meta')"
            )
        _check_hooks(model)
        self._init_fn = as_function(init, "init", ["module"]) if callable(init) else None
        self._given = self._weights(init)
        self._blocks: WeightBlocks | None = None
        #: id of a weight of which this process holds only a block -> its name in the model.
        self._divided: dict[int, str] = {}

    def _weights(self, init: Init | None) -> Mapping[str, Tensor] | None:
        if init is None or callable(init) or init == _RESET:
            return None
        paths = [init] if isinstance(init, str | os.PathLike) else init
        if not isinstance(init, Mapping) and not (
            isinstance(paths, Sequence) and all(isinstance(path, str | os.PathLike) for path in paths)
        ):
            raise InputError(
                f"init= must be 'reset', a function that fills a given module, a mapping from names to tensors, or "
                f"safetensors files; got {type(init).__name__}; pass one of them"
            )
        given = init if isinstance(init, Mapping) else WeightFiles(init)
        _check_names(self._state(), given)
        return given

    def _state(self) -> dict[str, Tensor]:
        """Return the tensors of the model's state dict, without detaching them. Tied tensors appear under all names."""
        state = self._model.state_dict(keep_vars=True)
        return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}

    def fill(
        self,
        owners: Owners,
        ranks: RankDevices,
        fail: Callable[[str, Exception], NoReturn],
        blocks: WeightBlocks | None = None,
    ) -> None:
        """Fill the tensors that this process's ranks hold, and the buffers that belong to no layer.

        Args:
            owners: the rank that holds each tensor.
            ranks: the ranks of this process, and their devices.
            fail: raises an error in this process, and makes the other processes raise an error as well.
            blocks: the weights of which this process holds only blocks. Default: None (all weights are whole).

        Raises:
            GraphError: some tensors were not filled. All ranks of a mesh raise this error.

        """
        if not self._empty:
            return
        recurrent = [module for module in self._model.modules() if isinstance(module, nn.RNNBase)]
        for module in recurrent:
            forget_weights(module)  # the module's weak references would prevent filling them
        units = _units(self._model)
        wanted = {id(buffer): ranks.devices[0] for unit in units for buffer in unit.loose}
        self._blocks = blocks
        named = self._model.named_parameters(remove_duplicate=False)
        self._divided = {} if blocks is None else {id(weight): name for name, weight in named if name in blocks}
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            if ranks.holds(owners.rank(name)):
                wanted[id(tensor)] = ranks.devices[owners.rank(name)]
        try:
            self._fill(units, wanted)
        except Exception as error:
            fail("filling the model", error)
        for module in recurrent:
            module.to(next(module.parameters()).device)  # creates the references again
        self._empty = False  # so that a new plan does not fill the model again
        self._given = None

    def _fill(self, units: "Sequence[_Unit]", wanted: Mapping[int, torch.device]) -> None:
        given = self._given or {}
        loaded = {id(tensor): name for name, tensor in self._state().items() if name in given and id(tensor) in wanted}
        drawn = {key: device for key, device in wanted.items() if key not in loaded}
        made: list[tuple[Tensor, Tensor]] = []
        unfilled: list[str] = []
        for unit in units:
            if any(id(tensor) in drawn for _, tensor in unit.empty):
                for name, tensor, full in self._drawn(unit):
                    if id(tensor) in drawn:
                        unfilled += [name] * _is_unwritten(full)
                        made.append((tensor, self._own(tensor, full.data).to(drawn[id(tensor)])))
        _check_filled(unfilled)
        for tensor, full in made:
            give_contents(tensor, full)
        for tensor in _distinct(self._state().values()):
            if id(tensor) in loaded:
                self._load(given, loaded[id(tensor)], tensor, wanted[id(tensor)])

    def _own(self, tensor: Tensor, whole: Tensor) -> Tensor:
        """Return the block of a tensor that this process holds, without the memory of the rest."""
        name = self._divided.get(id(tensor))
        return whole if name is None or self._blocks is None else self._blocks.own(name, whole).clone()

    def _whole_shape(self, tensor: Tensor) -> tuple[int, ...]:
        name = self._divided.get(id(tensor))
        shape = tuple(tensor.shape)
        return shape if name is None or self._blocks is None else self._blocks.whole_shape(name, shape)

    @torch.no_grad()
    def _load(self, given: Mapping[str, Tensor], name: str, tensor: Tensor, device: torch.device) -> None:
        own = torch.empty_like(tensor, device=device, requires_grad=False) if tensor.is_meta else tensor
        if isinstance(given, WeightFiles):
            given.read_into(name, own, lambda whole: self._own(tensor, whole))
        else:
            _check_form(given, name, tensor, self._whole_shape(tensor))
            own.copy_(self._own(tensor, given[name]))
        if tensor.is_meta:
            give_contents(tensor, own)

    @staticmethod
    def _fill_own(name: str, module: nn.Module, init_fn: Callable[[nn.Module], Any]) -> None:
        try:
            init_fn(module)
        except Exception as error:
            error.add_note(f"while init filled {name or 'the model'!r}")
            raise

    def _drawn(self, unit: "_Unit") -> list[tuple[str, Tensor, Tensor]]:
        """Run the initialization code of a unit's modules, while all other tensors are on the meta device.

        A unit is a set of modules that are filled together. Its random numbers do not depend on which other units
        this rank fills.

        Returns:
            (name, tensor, values) for each tensor of the unit.

        """
        held = [(place, tensor, _unwritten(tensor, self._whole_shape(tensor))) for place, tensor in unit.empty]
        for _, tensor, full in held:
            give_contents(tensor, full)
        for name, module in unit.modules:
            with _drawing(self.seed, name), torch.no_grad():
                if reset := reset_of(module):
                    reset()
                if self._init_fn is not None:
                    self._fill_own(name, module, self._init_fn)
        drawn = []
        for place, tensor, full in held:
            put = place.put_back(tensor)
            torch.utils.swap_tensors(tensor, full)
            drawn.append((place.name, tensor, full if put is None else put))
        return drawn


def _check_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta and hooks_on(parameter):
            raise GraphError(
                f"parameters on the meta device must not have hooks; {name!r} is on the meta device and has hooks; "
                f"register the hooks after building the pipeline"
            )


def _check_names(state: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    there = {id(tensor) for name, tensor in state.items() if name in given}
    missing = [name for name, tensor in state.items() if tensor.is_meta and id(tensor) not in there]
    unexpected = [name for name in given if name not in state and not str(name).endswith("_extra_state")]
    if missing or unexpected:
        lacking = f"missing names ({len(missing)} of the model's {len(state)}): {_some(missing)}"
        unknown = f"unknown names ({len(unexpected)} of {len(given)} that were passed): {_some(unexpected)}"
        parts = [lacking] * bool(missing) + [unknown] * bool(unexpected)
        remedies = ["add or rename the missing weights"] * bool(missing) + ["remove the unknown weights"] * bool(
            unexpected
        )
        raise InputError(
            f"the weights must have the names of the model's state_dict; {'; '.join(parts)}; {', and '.join(remedies)}"
        )
    if isinstance(given, dict | WeightFiles):  # another mapping may compute its tensors on access
        for name in given:
            if name in state:
                _check_form(given, name, state[name], tuple(state[name].shape))


def _check_form(given: Mapping[str, Tensor], name: str, tensor: Tensor, due: tuple[int, ...]) -> None:
    files = isinstance(given, WeightFiles)
    if not files and (not isinstance(given[name], Tensor) or given[name].is_meta):
        raise InputError(
            f"weights must be a mapping from names to tensors that are not on the meta device; {name!r} is "
            f"{shown(given[name])}; pass the state_dict of a model with weights"
        )
    shape = given.shape(name) if isinstance(given, WeightFiles) else tuple(given[name].shape)
    dtype = given.dtype(name) if isinstance(given, WeightFiles) else given[name].dtype
    if shape != due or dtype.is_floating_point != tensor.is_floating_point():
        raise InputError(
            f"each weight must have the same shape as the model's tensor, and both or neither must be floating-point; "
            f"{name!r} is {tensor.dtype} of shape {list(due)} in the model, but {dtype} of shape "
            f"{list(shape)} {'in the files' if files else 'in the mapping'}; use weights of the same model"
        )


def _check_filled(unfilled: Sequence[str]) -> None:
    if unfilled:
        raise GraphError(
            f"every weight of a model on the meta device must be filled; nothing fills {_some(unfilled)}. Give the "
            f"modules a reset_parameters method, or pass init=: a function that fills a given module, or a state_dict. "
            f"For buffers that __init__ computes, pass a function that builds the model instead of a model, such as "
            f"lambda: Model(config)"
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(str, names[:_SHOWN])) + more if names else "none"


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


# ---- units that are filled together -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Registration:
    """The module and the key under which a tensor is registered."""

    module: nn.Module
    key: str
    name: str

    def put_back(self, tensor: Tensor) -> Tensor | None:
        """Register ``tensor`` under its key again. Returns the tensor that had replaced it, if any."""
        own: dict[str, Any] = self.module._parameters if isinstance(tensor, nn.Parameter) else self.module._buffers
        put: Tensor | None = own[self.key]
        own[self.key] = tensor
        return None if put is tensor else put


@dataclass
class _Unit:
    """Modules that are filled together: a layer, or a container without its children."""

    #: The modules with unfilled tensors, submodules first.
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    #: The unfilled tensors that no earlier unit holds.
    empty: list[tuple[_Registration, Tensor]] = field(default_factory=list)
    #: Buffers that are registered on a container itself.
    loose: list[Tensor] = field(default_factory=list)


def _units(model: nn.Module) -> list[_Unit]:
    layers = layers_of(model) if is_in_a_row(model) else find_layers(model)
    units: dict[str, _Unit] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        layer = next((layer for layer in layers if f"{name}.".startswith(f"{layer}.")), None)
        unit = units.setdefault(name if layer is None else layer, _Unit())
        if lacks_contents(module):
            unit.modules.insert(0, (name, module))
        if layer is None:
            unit.loose += [buffer for buffer in module._buffers.values() if buffer is not None]
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.is_meta and id(tensor) not in seen:
                seen.add(id(tensor))
                unit.empty.append((_Registration(module, key, f"{name}.{key}".removeprefix(".")), tensor))
    return list(units.values())


def _unwritten(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a CPU tensor of a shape and the dtype of ``tensor``, filled with NaN or the largest integer.

    These values show later whether code has written to the tensor; see `_is_unwritten`.
    """
    if shape == tuple(tensor.shape):
        full = torch.empty_like(tensor, device="cpu", requires_grad=False)
    else:
        full = torch.empty(shape, dtype=tensor.dtype, device="cpu")
    if full.is_floating_point() or full.is_complex():
        return full.fill_(torch.nan)
    return full if full.dtype == torch.bool else full.fill_(torch.iinfo(full.dtype).max)


def _is_unwritten(tensor: Tensor) -> bool:
    """Return whether a tensor still holds only the values from `_unwritten`. Stops at the first other value."""
    if tensor.is_meta:
        return True
    if tensor.dtype == torch.bool:
        return tensor._version == 0
    for piece in tensor.detach().reshape(-1).split(1 << 16):
        if piece.is_floating_point() or piece.is_complex():
            blank = (piece if piece.is_complex() else piece.float()).isnan()
        else:
            blank = piece == torch.iinfo(piece.dtype).max
        if not blank.all():
            return False
    return tensor.numel() > 0
