"""Completed programs: digests of the programs that pipelines run, for every combination of options that adds actions.

``python -m tests.support.completed_programs`` writes `DIGESTS`. Write it again only for a new schedule, or
if programs are meant to change.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import product
from pathlib import Path

from pipesched import schedules
from pipesched.errors import ScheduleError
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.program_factory import ProgramFactory, StepPrograms
from pipesched.program.program import Program
from pipesched.simulation.costs import Costs
from pipesched.simulation.memory import rank_memory
from pipesched.simulation.replication import Replication
from pipesched.simulation.simulator import simulate

__all__ = ["DIGESTS", "REPLICAS", "Case", "cases", "digest"]

DIGESTS = Path(__file__).parent.parent / "planning" / "completed_programs.json"

_NUM_RANKS = 4
_NUM_MICROBATCHES = 6
_UPDATES = ("none", "optimizer", "clipping")
REPLICAS = {
    "alone": None,
    "zero 0": Replication(num_replicas=2),
    "zero 1": Replication(num_replicas=2, zero=1),
    "zero 2": Replication(num_replicas=2, zero=2),
    "zero 3": Replication(num_replicas=2, zero=3),
    "zero 3 often": Replication(num_replicas=2, zero=3, gather_once=False),
}
_TREATMENTS = ("never", "always", "except_last", "offload")


@dataclass(frozen=True)
class Case:
    """A combination of a schedule and options that add actions to its program."""

    schedule: str
    chunks: int
    updates: str
    replicas: str
    treatment: str

    def __str__(self) -> str:
        return f"{self.schedule} x{self.chunks}, {self.updates}, {self.replicas}, {self.treatment}"

    @property
    def num_stages(self) -> int:
        """The number of stages of one chain."""
        return _NUM_RANKS * self.chunks

    @property
    def layers(self) -> list[list[str]]:
        """The layers of each stage: two, one of which has a bucket of gradients, or no layer with gradients."""
        return [[f"{stage}.a", f"{stage}.b"] for stage in range(self.num_stages)]

    @property
    def replication(self) -> Replication | None:
        """The replicas; None for a single pipeline."""
        return REPLICAS[self.replicas]

    @property
    def offloaded(self) -> list[int]:
        """The stages whose activations are offloaded: every other one, if any."""
        return list(range(0, self.num_stages, 2)) if self.treatment == "offload" else []

    def buckets(self, num_stages: int) -> list[list[str]]:
        """Return the layers of each stage whose gradients are summed. Stage 1 is frozen."""
        return [[] if stage == 1 else ["b", "a"][: 1 + stage % 2] for stage in range(num_stages)]

    def factory(self) -> ProgramFactory:
        """Return the factory of the programs, as the construction of a pipeline sets it up."""
        schedule = schedules.get(self.schedule)
        if self.chunks != schedule.chunks_per_rank:
            schedule = schedule.with_options(chunks_per_rank=self.chunks)
        if "effort" in schedule.options:
            schedule = schedule.with_options(effort=1 / 120)
        treatment = {layer: "offload" for stage in self.offloaded for layer in self.layers[stage]}
        request = PlanRequest(
            schedule=schedule,
            num_stages=self.num_stages,
            num_microbatches=_NUM_MICROBATCHES,
            checkpoint=treatment or self.treatment,
        )
        norms = self.updates == "clipping"
        factory = ProgramFactory(request, _NUM_RANKS, updates=self.updates != "none", norms=norms)
        chain = [(stage, stage + 1) for stage in range(self.num_stages - 1)]
        program = factory.connect([*chain, (0, 2)], self.layers)
        if self.replication is not None:
            whole = program.num_weights == program.num_stages
            once = self.replication.gather_once if self.replication.zero == 3 else None
            factory.replicate(self.buckets(program.num_stages) if whole else [], once)
        factory.check_updates()
        return factory

    def costs(self, program: Program) -> Costs:
        """Return costs that differ from stage to stage, in units that add up exactly."""
        stages = range(program.num_stages)
        parts = program.num_weights
        buckets = [len(layers) for layers in self.buckets(program.num_stages)]
        own = self.replication
        if own is None or parts < program.num_stages:
            buckets = [0] * program.num_stages
        return Costs(
            forward_s=tuple(4 + stage % parts % 3 for stage in stages),
            input_grad_s=tuple(5 + stage % parts % 2 for stage in stages),
            weight_grad_s=tuple(3 + stage % parts % 4 for stage in stages),
            transfer_s=1,
            update_s=tuple(2 + stage % parts % 2 for stage in stages),
            norm_s=tuple(1 for _ in stages),
            offload_s=tuple(3 for _ in stages),
            fetch_s=tuple(2 for _ in stages),
            reduce_s=tuple(tuple(range(3, 3 + count)) for count in buckets),
            reduce_bytes=tuple((64,) * count for count in buckets),
            unshard_s=tuple(4 for _ in stages) if own is not None and own.zero == 3 else (),
            gather_s=tuple(2 for _ in stages) if own is not None and own.zero in (1, 2) else (),
            activation_bytes=tuple(1000 + 16 * stage for stage in stages),
            input_bytes=tuple(100 for _ in stages),
            output_bytes=tuple(100 for _ in stages),
            weight_grad_bytes=tuple(200 for _ in stages),
            offload_bytes=tuple(500 if stage % parts in self.offloaded else 0 for stage in stages),
            weight_bytes=tuple(4000 + 64 * stage for stage in stages),
            gradient_bytes=tuple(4000 + 64 * stage for stage in stages),
            optimizer_bytes=tuple(8000 for _ in stages),
            update_transient_bytes=tuple(300 for _ in stages),
        )


def cases(name: str) -> Iterator[Case]:
    """Yield all combinations of one schedule."""
    for parts in product(_chunks(name), _UPDATES, REPLICAS, _TREATMENTS):
        yield Case(name, *parts)


def _chunks(name: str) -> list[int]:
    """Return the numbers of chunks to try: the schedule's default, and the next larger number that it supports."""
    own = schedules.get(name)
    counts = [own.chunks_per_rank]
    for more in (3, 4) if own.chunks_per_rank > 1 else ():
        with suppress(ScheduleError):
            own.with_options(chunks_per_rank=more).program(_NUM_RANKS, _NUM_MICROBATCHES)
            return [*counts, more]
    return counts


def digest(case: Case) -> str:
    """Return a digest of all programs of a case, of the simulated time and of each rank's memory.

    The digest of a case that is refused is the error.
    """
    try:
        full = case.factory().full
        programs = [str(program) for program in _programs(full)]
    except ScheduleError as error:
        return f"refused: {str(error)[:50]}"
    program = full.without_messages
    costs = case.costs(program)
    replicas = None if case.replication is None else case.replication.buffers(costs)
    memories = rank_memory(program, costs, replicas=replicas)
    makespan_s = simulate(full.training, costs).makespan_s
    texts = [*programs, str(makespan_s), *(str(memory.total_bytes) for memory in memories)]
    return blake2b("\n\n".join(texts).encode(), digest_size=8).hexdigest()


def _programs(programs: StepPrograms) -> list[Program]:
    return [programs.training, programs.gradients, programs.inference, programs.open_pass]


if __name__ == "__main__":
    found = {str(case): digest(case) for name in schedules.names() for case in cases(name)}
    DIGESTS.write_text(json.dumps(found, indent=0) + "\n")
