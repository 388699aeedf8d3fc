"""Sampled: the form in which a pipeline got its sample, and what is said of a call in another form that went wrong."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

from torch import Tensor

from pipesched.errors import ArgumentError, GraphError, PipeschedError

__all__ = ["Form", "explained"]

_Method = TypeVar("_Method", bound=Callable[..., Any])

_LONGEST = 400  # letters of a form that an error shows
_BESIDE = ("target", "return_outputs", "gather")  # what a step takes that is not the model's


@dataclass(frozen=True)
class Form:
    """How arguments are passed, as the text of a call: ``(x=tensor, pair=(tensor, tensor))``."""

    text: str

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Form":
        """The form of a call with these."""
        named = (f"{name}={_shape(value)}" for name, value in sorted(kwargs.items()))
        return cls(f"({', '.join([*map(_shape, args), *named])})")

    def __str__(self) -> str:
        return self.text if len(self.text) <= _LONGEST else f"{self.text[:_LONGEST]}..."


class _Called(Protocol):
    _form: Form | None  # of the sample; None where this process is passed no batch


def explained(method: _Method) -> _Method:
    """A method that is called as the model is: what its code raises of a batch in another form than the sample's says
    so. Asked once it did not run: a model may take several forms.
    """

    @wraps(method)
    def run(own: _Called, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(own, *args, **kwargs)
        except (TypeError, LookupError, AttributeError, GraphError) as error:
            if own._form is None or (isinstance(error, PipeschedError) and not isinstance(error, GraphError)):
                raise
            given = Form.of(args, {name: value for name, value in kwargs.items() if name not in _BESIDE})
            if given == own._form:
                raise
            name = method.__name__
            other = ArgumentError(
                f"a batch is passed in the form of the sample, {name}{own._form}; got {name}{given}, with "
                f"which the model raises {type(error).__name__}: {error}; pass it so, or make the pipeline with a "
                f"sample in that form"
            )
            for note in getattr(error, "__notes__", ()):
                other.add_note(note)
            raise other from error

    return cast(_Method, run)


def _shape(value: Any) -> str:
    """A value as its form is written: containers with what is in them, a tensor, or else a type."""
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {_shape(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        if value and all(isinstance(one, Mapping) for one in value):
            return f"[{_shape(value[0])}, ...]"  # one a row
        return f"[{', '.join(map(_shape, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_shape, value))}{',' * (len(value) == 1)})"
    return "None" if value is None else type(value).__name__
