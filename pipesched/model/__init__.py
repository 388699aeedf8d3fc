"""The user's nn.Module: the module tree, the containers, the state, and the source of the weights."""
