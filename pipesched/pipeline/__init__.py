"""The front door: Pipeline, tune, replanning and the step log."""
