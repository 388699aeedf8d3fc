"""The user's nn.Module: its tree, containers, state, and where its weights come from."""
