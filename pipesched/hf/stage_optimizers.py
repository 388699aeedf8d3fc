"""Stage optimizers: the optimizers of a pipeline's stages, which update inside a step, as one optimizer for Trainer."""

from typing import Any

from torch.optim import Optimizer

from pipesched.pipeline.pipeline import Pipeline

__all__ = ["StageOptimizers"]


class StageOptimizers(Optimizer):
    """Stands for the optimizers of the stages: schedulers change their options, and ``step`` does nothing more."""

    _is_accelerate_prepared = True  # Accelerate must not wrap it: nothing is left to do
    step_was_skipped = False

    def __init__(self, pipeline: Pipeline, rate: float) -> None:
        self._pipeline = pipeline
        self.defaults: dict[str, Any] = {}
        self._no_parameters: dict[str, Any] = {"params": [], "lr": rate}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all stages of this process. A rank without parameters has one group, so that it has a rate."""
        groups = [group for optimizer in self._pipeline.optimizers.values() for group in optimizer.param_groups]
        return groups or [self._no_parameters]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        return {key: value for own in self._pipeline.optimizers.values() for key, value in own.state.items()}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: the pipeline's step has updated the weights."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the pipeline's step has cleared the gradients."""
