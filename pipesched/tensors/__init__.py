"""Values of torch as such: payloads, meta tensors, keyed random numbers. No model, stage or rank."""
