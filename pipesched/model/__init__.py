"""The user's nn.Module: its structure and its state, and the functions that load or initialise its weights."""
