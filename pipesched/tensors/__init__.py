"""Tools for torch tensors: payloads, meta tensors and keyed random numbers, independent of models, stages and ranks."""
