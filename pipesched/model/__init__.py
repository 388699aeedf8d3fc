"""The user's nn.Module: its tree, its containers, its state, and the source of its weights."""
