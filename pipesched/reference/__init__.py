"""The model in plain PyTorch: a training step without a pipeline, with the results that a pipeline must give."""
