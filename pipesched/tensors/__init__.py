"""Tools for torch tensors, such as payloads and keyed random numbers. They do not depend on models, stages or ranks."""
