"""Tools for torch tensors in general: payloads, meta tensors, keyed random numbers. No model, stage or rank."""
