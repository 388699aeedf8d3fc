"""Modules that torch and matplotlib import late: imported once, before processes are forked that all need them."""
# ruff: noqa: F401

import matplotlib.pyplot
import numpy.random
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.fx.experimental.symbolic_shapes  # sympy, at the first backward with given gradients

__all__: list[str] = []
