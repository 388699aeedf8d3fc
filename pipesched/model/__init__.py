"""The user's nn.Module: its module tree, its containers, its state, and the source of its weights."""
