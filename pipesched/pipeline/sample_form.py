"""Sample form: detects a batch that is structured differently from the sample, after a model has failed on it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipesched.errors import ArgumentError, GraphError, PipeschedError
from pipesched.runtime.microbatches import GivenBatch, Microbatch
from pipesched.units import counted

__all__ = ["MISFITS", "CallForm", "check_form"]

#: Errors that a model's code raises for arguments of a form that it does not accept.
MISFITS = TypeError, LookupError, AttributeError, GraphError

_LONGEST = 400  # the maximum number of characters of a form in an error message
#: Keywords of a step that are not passed to the model.
_BESIDE = ("target", "return_outputs", "gather", "microbatches", "metrics")


@dataclass(frozen=True)
class CallForm:
    """The structure (form) of a call's arguments, as text such as ``(x=tensor, pair=(tensor, tensor))``."""

    text: str
    typed: str = field(default="", compare=False)  #: the same text with the tensors' types and dimensions

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "CallForm":
        """Return the form of a call with these arguments."""

        def written(write: Callable[[Tensor], str]) -> str:
            named = (f"{name}={_shape(value, write)}" for name, value in sorted(kwargs.items()))
            return f"({', '.join([*(_shape(value, write) for value in args), *named])})"

        return cls(written(_plain), written(_typed))

    def __str__(self) -> str:
        return _short(self.text)


def check_form(form: CallForm | None, method: str, given: GivenBatch, error: Exception) -> None:
    """Raise ArgumentError if a model failed on a batch that is structured differently from the sample.

    Called only after the model has failed, because some models accept arguments of several forms.

    Args:
        form: the form of the sample; None in a process that passes no batch.
        method: the method of the pipeline that was called.
        given: the batch that was passed to this method.
        error: the error that the call raised.

    """
    if given.microbatches is None:
        _check_form(form, method, given.args, given.kwargs, error)
        return
    for one in given.microbatches if isinstance(given.microbatches, Sequence) else ():
        if isinstance(one, Microbatch):
            _check_form(form, "Microbatch", one.args, one.kwargs, error)


def _check_form(
    form: CallForm | None, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception
) -> None:
    if form is None or (isinstance(error, PipeschedError) and not isinstance(error, GraphError)):
        return
    given = CallForm.of(args, {name: value for name, value in kwargs.items() if name not in _BESIDE})
    if given == form and (given.typed == form.typed or not isinstance(error, GraphError)):
        return
    forms = [_short(one.typed) if given == form else str(one) for one in (form, given)]
    other = ArgumentError(
        f"a batch must have the form of the sample, {method}{forms[0]}; got {method}{forms[1]}, and the model raised "
        f"{type(error).__name__}: {error}; pass the batch in the sample's form, or make the pipeline with a sample in "
        f"the batch's form"
    )
    for note in getattr(error, "__notes__", ()):
        other.add_note(note)
    raise other from error


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _plain(_: Tensor) -> str:
    return "tensor"


def _typed(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} tensor of {counted(tensor.dim(), 'dimension')}"


def _shape(value: Any, write: Callable[[Tensor], str]) -> str:
    """Return a value's form as text: a container with its contents, a tensor, or the name of any other type."""
    if isinstance(value, Tensor):
        return write(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {_shape(one, write)}" for name, one in value.items()) + "}"
    if isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        return f"[{_shape(value[0], write)}, ...]"  # one dict per row
    if isinstance(value, list | tuple):
        parts = ", ".join(_shape(one, write) for one in value)
        return f"[{parts}]" if isinstance(value, list) else f"({parts}{',' * (len(value) == 1)})"
    return "None" if value is None else type(value).__name__
