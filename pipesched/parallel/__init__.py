"""Layers that several ranks divide among themselves, as Megatron-LM does (Shoeybi et al. 2019, arXiv:1909.08053)."""
