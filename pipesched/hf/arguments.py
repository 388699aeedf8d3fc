"""Pipeline arguments: the options of a trainer's pipeline, as a dataclass that HfArgumentParser can read."""

from dataclasses import dataclass, field
from typing import Literal

from pipesched.checks import shown
from pipesched.errors import InputError
from pipesched.planning.plan import Plan

__all__ = ["PipelineArguments"]


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(kw_only=True)
class PipelineArguments:
    """The options of a trainer's pipeline.

    ::

        parser = HfArgumentParser((TrainingArguments, PipelineArguments))
        args, pipeline = parser.parse_args_into_dataclasses()
        trainer = PipelineTrainer(model=model, args=args, pipeline=pipeline, train_dataset=dataset)

    Args:
        pipeline_devices: the device of each rank if one process runs all ranks, such as ``["cuda:0", "cuda:1"]``.
            Default: all accelerators that the process sees, or one CPU. Under torchrun each process is one rank, on the
            device of its TrainingArguments.
        pipeline_parallel_size: the number of ranks of each pipeline, under torchrun. Default: all processes. With
            fewer, the processes form several replicas of the pipeline, each with its own part of the data.
        pipeline_tensor_size: the number of processes over which the layers of a model are split, under torchrun, as
            ``Distributed(tensor_parallel="auto")`` splits them. ``pipeline_parallel_size`` times as many processes then
            form a pipeline. Default: 1 (layers are whole).
        pipeline_schedule: the name of a schedule. Default: "auto" (the best plan that a search finds).
        pipeline_microbatches: the number of micro-batches of a training step in each pipeline, a multiple of
            ``gradient_accumulation_steps``. Default: at least twice the number of ranks of a pipeline.
        pipeline_checkpoint: the micro-batches whose activations are recomputed: "never", "except_last" or "always".
            Default: "never", unless the memory limit requires more.
        pipeline_zero: which training state is split across replicas: 0 none, 1 optimizer states, 2 also gradients, 3
            also weights. Default: 0.
        pipeline_memory_limit: the memory of each rank, such as "16GB". Default: None (not limited).
        pipeline_plan: the file of a `Plan`, as written by ``Plan.save`` or ``pipesched tune``. Default: None.

    Raises:
        InputError: a value is wrong, or two options contradict each other.

    """

    pipeline_devices: list[str] | None = field(default=None, metadata={"help": "Device of each rank, in one process."})
    pipeline_parallel_size: int | None = field(default=None, metadata={"help": "Number of processes of a pipeline."})
    pipeline_tensor_size: int = field(default=1, metadata={"help": "Number of processes that split each layer."})
    pipeline_schedule: str = field(
        default="auto", metadata={"help": "Name of a schedule; auto searches for the best plan."}
    )
    pipeline_microbatches: int | None = field(default=None, metadata={"help": "Micro-batches of a training step."})
    pipeline_checkpoint: Literal["never", "except_last", "always"] | None = field(
        default=None, metadata={"help": "Micro-batches to recompute."}
    )
    pipeline_zero: int = field(
        default=0, metadata={"help": "Split over replicas: 1 optimizer states, 2 gradients, 3 weights."}
    )
    pipeline_memory_limit: str | None = field(default=None, metadata=_help("Memory of each rank, such as 16GB."))
    pipeline_plan: str | None = field(default=None, metadata=_help("File of a plan, as written by pipesched tune."))

    def __post_init__(self) -> None:
        for name in ("pipeline_parallel_size", "pipeline_tensor_size", "pipeline_microbatches"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InputError(
                    f"{name} must be a whole number of at least 1; got {shown(value)}; pass one, or leave {name} out"
                )
        if self.pipeline_plan is not None and (self.pipeline_schedule != "auto" or self.pipeline_microbatches):
            raise InputError(
                f"a plan fixes the schedule and the number of micro-batches; got pipeline_plan={self.pipeline_plan!r} "
                f"with pipeline_schedule={self.pipeline_schedule!r} and "
                f"pipeline_microbatches={self.pipeline_microbatches}; leave the last two out"
            )

    @property
    def plan(self) -> Plan | None:
        return None if self.pipeline_plan is None else Plan.load(self.pipeline_plan)

    def microbatches_per_batch(self, accumulation: int, num_ranks: int, total: int | None) -> int:
        """Return the number of micro-batches into which each batch of the data loader is split.

        Args:
            accumulation: the number of batches in a training step.
            num_ranks: the number of ranks of a pipeline.
            total: the number of micro-batches of a step in the checkpoint from which training resumes; None for a new
                run.

        """
        plan = self.plan
        asked = self.pipeline_microbatches or total or (None if plan is None else plan.program.num_microbatches)
        if asked is None:
            return -(-2 * num_ranks // accumulation)
        if asked % accumulation:
            raise InputError(
                f"each batch of a training step must be split into equally many micro-batches; got {asked} "
                f"micro-batches (pipeline_microbatches, or those of the plan or checkpoint) and "
                f"gradient_accumulation_steps={accumulation}; pass a multiple, such as "
                f"pipeline_microbatches={-(-asked // accumulation) * accumulation}"
            )
        return asked // accumulation
