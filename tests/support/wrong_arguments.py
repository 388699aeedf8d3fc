"""Tables of wrong arguments: what a public function does with each must be an error that says what to pass."""

import math

import pytest
import torch
from torch import nn

from pipesched.errors import PipeschedError

#: What nobody means: of every type that a caller may have at hand by mistake.
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
    """The strange values without those that an argument does take, by name."""
    assert set(good) <= set(STRANGE)
    return [name for name in STRANGE if name not in good]


def cases(table):
    """(argument, name of the strange value) of a table {argument: the names}, for ``parametrize``."""
    return [pytest.param(argument, name, id=f"{argument} is {name}") for argument in table for name in table[argument]]


def refused(call, **given):
    """The call raises an error of pipesched, also a built-in one, of a rule, what was given, and a remedy."""
    with pytest.raises(PipeschedError) as caught:
        call(**given)
    assert isinstance(caught.value, ValueError | RuntimeError)
    assert str(caught.value).count("; ") >= 2, caught.value
