"""The main API: Pipeline, tune, replanning and the step log."""
