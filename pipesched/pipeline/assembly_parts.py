"""Assembly parts: what a step, a check, a forward and a backward of a plan need besides their programs."""

from collections.abc import Iterator
from dataclasses import dataclass

from pipesched.pipeline.assembly import Assembly
from pipesched.runtime.gradients.nonfinite_reaction import NonfiniteReaction
from pipesched.runtime.rank_host import RankHost
from pipesched.runtime.stage.kept_buffers import KeptBuffers
from pipesched.runtime.stage.run_parts import RunPart, RunParts
from pipesched.runtime.step_parts import (
    GradientVerdicts,
    LateUpdates,
    LossReading,
    LossScaling,
    NonfiniteChecks,
    ReplicaGradients,
    TiedGradients,
)

__all__ = ["READ_STEPS", "AssemblyParts"]

#: The number of first steps in which the tensors that layers make are recorded, and batches on GPUs are compared.
READ_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class AssemblyParts:
    """The parts of each kind of run of an assembly. They are made once for a plan.

    A part is there only if the assembly needs it. So a step of a plain model calls no part that has nothing to do.
    """

    assembly: Assembly
    #: A training step.
    step: RunParts
    #: The forwards and backwards of a step without an update, for `Pipeline.check`.
    check: RunParts
    #: A run without backwards.
    forward: RunParts
    #: The backwards of a forward whose output is differentiated.
    backward: RunParts

    @classmethod
    def of(
        cls,
        assembly: Assembly,
        host: RankHost,
        buffers: KeptBuffers,
        reaction: NonfiniteReaction,
        intra_op_threads: int,
    ) -> "AssemblyParts":
        """Make the parts of an assembly.

        Args:
            assembly: the stages of a plan.
            host: the ranks.
            buffers: the buffers that a failed step restores.
            reaction: raises or warns if gradients are infinite or NaN.
            intra_op_threads: the number of CPU threads of each rank.

        """
        kept = [buffers] if buffers.exist else []
        statistics = [assembly.norms] if assembly.norms.active else []
        copied = list(_copied_gradients(assembly))
        sums = [] if assembly.late_sums is None else [ReplicaGradients(assembly.late_sums, assembly.stages.values())]
        late = list(_late_parts(assembly, host, reaction, intra_op_threads))
        return cls(
            assembly=assembly,
            step=RunParts([*_reading(assembly, READ_STEPS), *statistics, *copied, *kept, *sums, *late]),
            check=RunParts([*_reading(assembly), *statistics, *copied, *sums]),
            forward=RunParts(statistics),
            backward=RunParts(copied),
        )


def _reading(assembly: Assembly, *num_steps: int) -> Iterator[RunPart]:
    if assembly.reads_losses:
        yield LossReading(*num_steps)


def _copied_gradients(assembly: Assembly) -> Iterator[RunPart]:
    """Yield the parts that add gradients of copies to those of the weights. A weight copy can be tied, so ties last."""
    if assembly.weight_copies:
        yield assembly.weight_copies
    if assembly.ties:
        yield TiedGradients(assembly.ties)


def _late_parts(
    assembly: Assembly, host: RankHost, reaction: NonfiniteReaction, intra_op_threads: int
) -> Iterator[RunPart]:
    """Yield the parts that act on complete gradients: late updates, loss scaling, and checks of the gradients."""
    stages = list(assembly.stages.values())
    rules = assembly.rules
    verdicts = None
    if rules is not None:
        verdicts = GradientVerdicts(
            rules,
            stages,
            host.collectives,
            intra_op_threads=intra_op_threads,
            divided=assembly.zero > 0,
            late=assembly.late_sums,
        )
    if assembly.updates_late:
        yield LateUpdates(stages, intra_op_threads, verdicts)
    if rules is None or verdicts is None:
        return
    if rules.scale is not None:
        yield LossScaling(verdicts, host.grid.devices[assembly.program.output_rank], updates=assembly.has_optimizers)
    if rules.on_nonfinite is not None:
        yield NonfiniteChecks(verdicts, assembly.layer_names, host.grid.replica, reaction)
