"""Refinement of the best candidates of a search: their stage boundaries and their orders."""
