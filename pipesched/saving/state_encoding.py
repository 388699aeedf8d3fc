"""State encoding: encodes nested values as JSON and separate tensors, without pickle.

The supported types are None, bool, int, float, str, list, tuple, dict, tensors, and numeric numpy arrays and scalars.
Each value is read back with the same type and the same bits, except that an OrderedDict becomes a dict.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipesched.checks import is_text
from pipesched.errors import CheckpointError
from pipesched.saving.tensor_files import bytes_of, dtype_name, dtype_of, from_bytes, plain

__all__ = ["Encoder", "at_path", "decoded", "tensor_keys"]

_LARGEST = 2**63  # integers outside +-2**63 are written as text
_DEEPEST = 24  # the maximum depth of nesting of a value
_NUMBERS_OF_NUMPY = "biufc"

#: Type of a value without parts -> function that encodes the value.
_ATOMS: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: lambda value: value if -_LARGEST < value < _LARGEST else {"int": str(value)},
    float: lambda value: value if math.isfinite(value) else {"float": str(value)},
    str: lambda value: value,
}


class Encoder:
    """Encodes values, and collects their tensors under unique keys that begin with ``prefix``.

    0-d CPU tensors are not collected, but written into the JSON. If ``inline`` is True, all tensors are written into
    the JSON.
    """

    def __init__(self, prefix: str, *, inline: bool = False) -> None:
        self._prefix = prefix
        self._inline = inline
        self.tensors: dict[str, Tensor] = {}

    def encoded(self, value: Any, path: tuple[Any, ...] = ()) -> Any:
        """Return the value in a form that can be written as JSON.

        Raises CheckpointError for a value that cannot be saved; the error names the path of this value.
        """
        if len(path) > _DEEPEST:
            raise CheckpointError(
                f"saved values may be nested at most {_DEEPEST} levels deep; {self._place(path[:3])} is nested more "
                f"deeply, or contains itself; save a flatter state"
            )
        kind = type(value)
        if kind in _ATOMS and (kind is not str or is_text(value)):
            written = _ATOMS[kind](value)
        elif kind in (list, tuple):
            parts = [self.encoded(part, (*path, index)) for index, part in enumerate(value)]
            written = parts if kind is list else {"tuple": parts}
        elif kind in (dict, OrderedDict):
            written = self._mapping(value, path)
        elif kind is Counter:  # as in MultiStepLR
            written = {"counter": [[self.encoded(key, (*path, "key")), count] for key, count in value.items()]}
        elif isinstance(value, Tensor):
            written = self._of_tensor(plain(value, self._place(path)), path)
        elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _NUMBERS_OF_NUMPY:
            written = self._of_numpy(value, path)
        else:
            raise CheckpointError(
                f"a checkpoint can hold None, bool, int, float, str, list, tuple, dict, tensors and numpy numbers; "
                f"{self._place(path)} is of type {kind.__module__}.{kind.__qualname__}; convert it, or leave it out"
            )
        return written

    def _mapping(self, value: Mapping[Any, Any], path: tuple[Any, ...]) -> Any:
        if all(type(key) is str and is_text(key) for key in value):
            return {"dict": {key: self.encoded(part, (*path, key)) for key, part in value.items()}}
        pairs = [[self.encoded(key, (*path, "key")), self.encoded(part, (*path, key))] for key, part in value.items()]
        return {"pairs": pairs}

    def _of_tensor(self, tensor: Tensor, path: tuple[Any, ...]) -> Any:
        if self._inline or (not tensor.dim() and tensor.device.type == "cpu"):
            return {"scalar": bytes_of(tensor).hex(), "dtype": dtype_name(tensor.dtype), "shape": [*tensor.shape]}
        return {"tensor": self._add(tensor, path)}

    def _of_numpy(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, np.generic):
            return {"number": value.dtype.str, "hex": value.tobytes().hex()}
        data = torch.frombuffer(bytearray(value.tobytes()) or bytearray(1), dtype=torch.uint8)[: value.nbytes]
        return {"array": self._add(data, path), "dtype": value.dtype.str, "shape": list(value.shape)}

    def _add(self, tensor: Tensor, path: tuple[Any, ...]) -> str:
        key = "/".join((self._prefix, *map(str, path)))
        while key in self.tensors:
            key += "'"
        self.tensors[key] = tensor
        return key

    def _place(self, path: tuple[Any, ...]) -> str:
        return self._prefix + "".join(f"[{part!r}]" for part in path)


def decoded(value: Any, read: Callable[[str], Tensor]) -> Any:
    """Decode the output of ``Encoder.encoded``. ``read(key)`` returns the tensor with that key.

    Raises CheckpointError if the value is not valid output of ``Encoder.encoded``.
    """
    if isinstance(value, list):
        return [decoded(part, read) for part in value]
    if not isinstance(value, dict):
        return value
    reader = _READERS.get(frozenset(value))
    if reader is None:
        raise CheckpointError(
            "the values in a checkpoint must have been encoded by pipesched; got an object with the keys "
            f"{sorted(value)}; save the checkpoint again"
        )
    return reader(value, read)


def _read_scalar(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if math.prod(shape) * dtype.itemsize != len(data):
        raise CheckpointError(
            f"a saved tensor of shape {list(shape)} and {dtype} must have {math.prod(shape) * dtype.itemsize} bytes; "
            f"got {len(data)}; save the checkpoint again"
        )
    return from_bytes(data, dtype, shape)


def _read_array(own: Any, read: Callable[[str], Tensor]) -> Any:
    return np.frombuffer(read(own["array"]).numpy().tobytes(), _number(own["dtype"])).reshape(own["shape"]).copy()


#: The keys of an encoded object -> function that decodes it.
_READERS: dict[frozenset[str], Callable[[Any, Callable[[str], Tensor]], Any]] = {
    frozenset(keys): reader
    for keys, reader in (
        (["dict"], lambda own, read: {key: decoded(part, read) for key, part in own["dict"].items()}),
        (["pairs"], lambda own, read: {decoded(key, read): decoded(part, read) for key, part in own["pairs"]}),
        (["counter"], lambda own, read: Counter({decoded(key, read): count for key, count in own["counter"]})),
        (["tuple"], lambda own, read: tuple(decoded(part, read) for part in own["tuple"])),
        (["int"], lambda own, read: int(own["int"])),
        (["float"], lambda own, read: float(own["float"])),
        (["tensor"], lambda own, read: read(own["tensor"])),
        (
            ["scalar", "dtype", "shape"],
            lambda own, read: _read_scalar(bytes.fromhex(own["scalar"]), dtype_of(own["dtype"]), tuple(own["shape"])),
        ),
        (["number", "hex"], lambda own, read: np.frombuffer(bytes.fromhex(own["hex"]), _number(own["number"]))[0]),
        (["array", "dtype", "shape"], _read_array),
    )
}


def tensor_keys(value: Any) -> set[str]:
    """Return the keys of all tensors in an encoded value."""
    if isinstance(value, list):
        return {key for part in value for key in tensor_keys(part)}
    if not isinstance(value, dict):
        return set()
    if "dict" in value:
        return tensor_keys(list(value["dict"].values()))
    own = {value[word] for word in ("tensor", "array") if isinstance(value.get(word), str)}
    return own | tensor_keys([value.get("pairs"), value.get("tuple")])


def _number(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in _NUMBERS_OF_NUMPY:
        raise CheckpointError(f"a saved numpy array must hold numbers; got dtype {name!r}; save the checkpoint again")
    return dtype


def at_path(value: Any, path: Sequence[Any]) -> Any:
    """Return the value at a path into nested dicts, lists and tuples; None if there is no such path."""
    for step in path:
        try:
            value = value[step]
        except (LookupError, TypeError):
            return None
    return value
