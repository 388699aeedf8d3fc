"""Refinement: improves the stage boundaries and the orders of actions of a search's best candidates."""
