"""Step parts: what steps need besides their program: sums over replicas, late updates, loss scaling and checks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.model.tied_weights import Ties
from pipesched.runtime.collectives import RankCollectives
from pipesched.runtime.gradients.buckets import GradientBuckets
from pipesched.runtime.gradients.nonfinite_reaction import NonfiniteReaction
from pipesched.runtime.gradients.nonfinite_watch import NonfiniteWatch
from pipesched.runtime.gradients.norms import GradientNorms
from pipesched.runtime.gradients.rules import GradientRules, Verdict
from pipesched.runtime.shared_overflow import share_overflow
from pipesched.runtime.stage.run_parts import RunPart
from pipesched.runtime.stage.stage import Stage
from pipesched.runtime.stage.step_data import StepData
from pipesched.tensors.caller_context import intra_op
from pipesched.tensors.tensor_table import LayerValues

__all__ = [
    "GradientVerdicts",
    "LateUpdates",
    "LossReading",
    "LossScaling",
    "NonfiniteChecks",
    "ReplicaGradients",
    "TiedGradients",
]


class LossReading(RunPart):
    """Records the tensors that layers make, for checks of a user's loss function, in the first steps."""

    def __init__(self, num_steps: float = math.inf) -> None:
        self._num_steps = num_steps

    def begin(self, step_data: StepData) -> None:
        if step_data.step < self._num_steps:
            step_data.layer_values = LayerValues()


class TiedGradients(RunPart):
    """Adds the gradients of the leaves of tied weights to the gradients of the weights."""

    def __init__(self, ties: Ties) -> None:
        self._ties = ties

    def after_run(self, step_data: StepData) -> None:
        self._ties.deliver()


class ReplicaGradients(RunPart):
    """Sums gradients over the replicas.

    Args:
        late: the gradients that are complete only after a run.
        stages: the stages of this process. Their own gradients are summed by REDUCE actions during a run.

    """

    def __init__(self, late: GradientBuckets, stages: Iterable[Stage]) -> None:
        self._late = late
        self._every = [late, *(stage.gradients for stage in stages if stage.gradients is not None)]

    def begin(self, step_data: StepData) -> None:
        """Set earlier gradients aside, so that they are not summed again."""
        for gradients in self._every:
            gradients.begin()

    def after_run(self, step_data: StepData) -> None:
        if self._late.parameters:
            self._late.start(0)
            self._late.wait()


class GradientVerdicts:
    """Decides, from the gradients of all processes, whether the update of a step is skipped.

    Args:
        rules: the rules for gradients before an update.
        stages: the stages of this process.
        collectives: exchange norms between the processes.
        intra_op_threads: the number of CPU threads that read the gradients.
        divided: whether replicas divide the states of optimizers.
        late: the gradients that are complete only after a run; None if there is one replica.

    """

    def __init__(
        self,
        rules: GradientRules,
        stages: Sequence[Stage],
        collectives: RankCollectives,
        *,
        intra_op_threads: int,
        divided: bool,
        late: GradientBuckets | None,
    ) -> None:
        self.rules = rules
        self._stages = stages
        self._collectives = collectives
        self._intra_op_threads = intra_op_threads
        self._divided = divided
        self._late = late

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the stages of this process update."""
        return [parameter for stage in self._stages for parameter in stage.optimizer.parameters]

    @property
    def last(self) -> Verdict | None:
        """The verdict on the last update; None before the first update, and in a process without stages."""
        return next((stage.optimizer.verdict for stage in self._stages), None)

    def decide(self, losses: Mapping[int, Tensor]) -> Verdict:
        """Compute the gradient norms of all processes, and decide whether the update is skipped. Collective.

        ``losses`` holds the losses of the step in the process that runs the last stage.
        """
        with intra_op(self._intra_op_threads):
            if self._divided:
                measured = [stage.optimizer.measure(self.rules, losses.values()) for stage in self._stages]
                norms = GradientNorms.merged(measured)
            else:
                norms = self.rules.measure(self.parameters, losses.values())
            if self._late is not None:
                norms = self._late.common(norms)
            return self.rules.decide(self._collectives.gathered(norms))

    def share_overflow(self) -> None:
        """If any gradient of any process is infinite or NaN, make all gradients infinite or NaN. Collective."""
        share_overflow(self.parameters, self._collectives, self._intra_op_threads)

    def gathered(self, value: Any) -> list[Any]:
        """All-gather a value over the processes of all replicas of all planes, in the order of planes and ranks."""
        planes = self._collectives.gather_over_planes(
            self._collectives.gather_over_replicas(self._collectives.gathered(value))
        )
        return [one for replicas in planes for replica in replicas for one in replica]


class LateUpdates(RunPart):
    """Runs the updates that wait for the gradients of tied weights, which are complete only after a run.

    Args:
        stages: the stages of this process.
        intra_op_threads: the number of CPU threads of the updates.
        verdicts: decides whether updates are skipped. None: there are no rules for gradients.

    """

    def __init__(self, stages: Sequence[Stage], intra_op_threads: int, verdicts: GradientVerdicts | None) -> None:
        self._stages = stages
        self._intra_op_threads = intra_op_threads
        self._verdicts = verdicts

    def after_run(self, step_data: StepData) -> None:
        verdict = None if self._verdicts is None else self._verdicts.decide(step_data.losses)
        with intra_op(self._intra_op_threads):
            for stage in self._stages:
                stage.optimizer.update_late(verdict)
            for stage in self._stages:
                stage.optimizer.wait()


class LossScaling(RunPart):
    """Scales the losses of a step, and adapts the scale.

    Args:
        verdicts: the verdicts on updates.
        device: the device of the loss.
        updates: whether steps update the weights. If not, the user's own scaler skips the update after an overflow.

    """

    def __init__(self, verdicts: GradientVerdicts, device: torch.device, *, updates: bool) -> None:
        self._verdicts = verdicts
        self._device = device
        self._updates = updates

    def begin(self, step_data: StepData) -> None:
        step_data.loss_scale = self._verdicts.rules.loss_scale(self._device)

    def finish(self, step_data: StepData) -> None:
        self._verdicts.rules.finish(self._verdicts.last)
        if not self._updates:
            self._verdicts.share_overflow()


class NonfiniteChecks(RunPart):
    """Raises or warns if the loss or a gradient of a step is infinite or NaN.

    Args:
        verdicts: the verdicts on updates.
        layers: the names of the model's layers, in the order in which they run.
        replica: the number of this replica.
        reaction: raises or warns, for some devices one step later.

    """

    def __init__(
        self, verdicts: GradientVerdicts, layers: Sequence[str], replica: int, reaction: NonfiniteReaction
    ) -> None:
        self._verdicts = verdicts
        self._layers = layers
        self._replica = replica
        self._reaction = reaction

    def begin(self, step_data: StepData) -> None:
        step_data.watch = NonfiniteWatch(self._layers, self._replica * len(step_data.inputs))

    def finish(self, step_data: StepData) -> None:
        verdicts = self._verdicts
        verdict = verdicts.last or verdicts.decide(step_data.losses)
        if step_data.watch is not None:
            self._reaction.react(step_data.step, verdict, step_data.watch, verdicts.rules, verdicts.gathered)
