"""Layers that several ranks divide among themselves, as Megatron-LM does (Shoeybi et al. 2019, arXiv:1909.08053)."""

from pipesched.parallel.cross_entropy import VocabularyCrossEntropy
from pipesched.parallel.layer_styles import Attention, Block, Column, DividedVocabulary, Heads, Row

__all__ = ["Attention", "Block", "Column", "DividedVocabulary", "Heads", "Row", "VocabularyCrossEntropy"]
