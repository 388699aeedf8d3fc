"""Elastic: moves the state of a run between processes, when the plan or the ranks change while training."""
