"""The front door: Pipeline, tune, replanning, the step log."""
