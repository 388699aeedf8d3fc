"""Layers that several ranks divide among themselves, in one to three dimensions."""

from pipesched.parallel.cross_entropy import VocabularyCrossEntropy
from pipesched.parallel.grid_linears import Linear2D, Linear2p5D, Linear3D
from pipesched.parallel.layer_styles import Attention, Block, Column, DividedVocabulary, Heads, Row
from pipesched.simulation.tensor_layout import TensorLayout

__all__ = [
    "Attention",
    "Block",
    "Column",
    "DividedVocabulary",
    "Heads",
    "Linear2D",
    "Linear2p5D",
    "Linear3D",
    "Row",
    "TensorLayout",
    "VocabularyCrossEntropy",
]
