"""Runs programs: stages, executors, transport, and the ranks' host."""
