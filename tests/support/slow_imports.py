"""Modules that torch and matplotlib import late, imported once here before processes are forked."""
# ruff: noqa: F401

import matplotlib.pyplot
import numpy.random
import torch
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.fx.experimental.symbolic_shapes  # sympy, at the first backward with given gradients

torch.compiler.disable(lambda: None)  # dynamo: 200 modules at the first step

__all__: list[str] = []
