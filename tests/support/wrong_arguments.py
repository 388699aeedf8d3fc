"""Tables of wrong arguments: a public function must raise an error with a remedy for each."""

import math

import pytest
import torch
from torch import nn

from pipesched.errors import PipeschedError

#: Name -> a value that a caller may pass by mistake, of many types.
STRANGE = {
    "None": None,
    "a bool": True,
    "zero": 0,
    "a number": 3,
    "negative": -1,
    "a fraction": 1.5,
    "NaN": math.nan,
    "infinite": math.inf,
    "an empty text": "",
    "a text": "x",
    "bytes": b"x",
    "an empty list": [],
    "a list of None": [None],
    "an empty dict": {},
    "a dict": {"x": 1},
    "an object": object(),
    "a function": lambda: None,
    "a tensor": torch.ones(2),
    "a module": nn.Linear(3, 3),
    "a class": dict,
}


def but(*good):
    """Return the names of all values in STRANGE except those that an argument accepts."""
    assert set(good) <= set(STRANGE)
    return [name for name in STRANGE if name not in good]


def cases(table):
    """Convert a table {argument: names of wrong values} to cases (argument, name) for ``parametrize``."""
    return [pytest.param(argument, name, id=f"{argument} is {name}") for argument in table for name in table[argument]]


def refused(call, **given):
    """Check that the call raises an error that states a rule, the value and a remedy."""
    with pytest.raises(PipeschedError) as caught:
        call(**given)
    assert isinstance(caught.value, ValueError | RuntimeError)
    assert str(caught.value).count("; ") >= 2, caught.value
