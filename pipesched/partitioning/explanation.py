"""Explanation: computes the costs of each stage of a partition, and explains why no other partition is faster."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from pipesched.partitioning.activation_options import ActivationOption, with_copies
from pipesched.partitioning.bisection import FoundPartition
from pipesched.partitioning.blocks import Cuts, cuts_of
from pipesched.partitioning.problem import CutProblem
from pipesched.partitioning.result import Partition, StageSummary, span
from pipesched.partitioning.search import PartitionSolution
from pipesched.partitioning.slots import StageSlot, TransferCost
from pipesched.program.action_arrays import Ints
from pipesched.units import counted, quote_bytes, quote_time

__all__ = ["explained"]


@dataclass(frozen=True)
class _StageCosts:
    """The costs of a partition's stages."""

    problem: CutProblem
    found: FoundPartition

    @cached_property
    def cuts(self) -> Cuts:
        return cuts_of(self.problem.blocks, self.found.order)

    @cached_property
    def transfer(self) -> TransferCost:
        transfer = self.problem.transfer(self.cuts)
        inside = [end for (slot, _, end), (other, _, _) in pairwise(self.stages) if slot.rank == other.rank]
        if inside and len(transfer.ticks) > 1:
            transfer.ticks[inside] = 0
        return transfer

    @cached_property
    def weighed(self) -> dict[Any, tuple[Ints, Ints]]:
        return {slot.speed: slot.weighed(self.cuts, self.transfer) for slot in self.found.slots}

    @cached_property
    def stages(self) -> list[tuple[StageSlot, int, int]]:
        """The slot, the start cut and the end cut of each stage."""
        return [(slot, a, b) for slot, (a, b) in zip(self.found.slots, pairwise([0, *self.found.ends]), strict=True)]

    def time(self, slot: StageSlot, begin: int, end: int) -> int:
        """Return the time of a stage between two cuts, in ticks."""
        if self.found.chosen:
            chosen = self.chosen(begin, end)
            ticks = slot.time(sum(option.ticks for option in chosen) * slot.speed.denominator)
            forward = slot.time(sum(option.forward_ticks for option in chosen) * slot.speed.denominator)
            return int(with_copies(forward, ticks, sum(option.copy_ticks for option in chosen)))
        ends, begins = self.weighed[slot.speed]
        return slot.time(int(ends[end] - begins[begin]))

    def chosen(self, begin: int, end: int) -> list[ActivationOption]:
        """Return the activation option of each layer between two cuts; [] if all activations are kept on the device."""
        return [self.found.chosen[layer] for layer in self.layers(begin, end)] if self.found.chosen else []

    def held(self, slot: StageSlot, begin: int, end: int) -> tuple[int, int]:
        """Return a stage's activations for all micro-batches in flight, and the stage's total memory, both in bytes."""
        chosen = self.chosen(begin, end)
        if chosen:
            held = sum(c.held_bytes(slot.in_flight) for c in chosen)
            fixed = sum(c.fixed_bytes for c in chosen)
            return held - fixed, held + max(c.working_bytes for c in chosen)
        activations = slot.in_flight * self.cuts.activation_bytes
        memory = slot.memory(self.cuts)
        return int(activations[end] - activations[begin]), int(memory[end] - memory[begin])

    def layers(self, begin: int, end: int) -> list[int]:
        """Return the layers between two cuts, in topological order."""
        members = self.problem.blocks.members
        return sorted(layer for block in self.found.order[begin:end] for layer in members[block])


def explained(problem: CutProblem, found: FoundPartition, solution: PartitionSolution) -> Partition:
    """Build a `Partition` with the cost of each stage, and an explanation of why no other partition is faster."""
    costs = _StageCosts(problem, found)
    layers = problem.blocks.layers
    stages = [[layers.names[layer] for layer in costs.layers(begin, end)] for _, begin, end in costs.stages]
    bottleneck, reason = _bottleneck(costs, stages, solution)
    return Partition(
        stages=stages,
        bottleneck_s=layers.seconds(found.bottleneck),
        lower_bound_s=layers.seconds(found.bottleneck if solution.exact else solution.lower),
        ranks=tuple(slot.rank for slot in found.slots),
        summaries=tuple(_summaries(costs, stages)),
        bottleneck=bottleneck,
        reason=reason,
        ideals=solution.ideals,
        probes=solution.probes,
        checkpoint={layers.names[at]: option.keep for at, option in enumerate(found.chosen) if option.keep},
    )


def _summaries(costs: _StageCosts, stages: list[list[Any]]) -> Iterator[StageSummary]:
    layers = costs.problem.blocks.layers
    cuts = costs.cuts
    for names, (slot, begin, end) in zip(stages, costs.stages, strict=True):
        members = costs.layers(begin, end)
        chosen = [option.keep for option in costs.chosen(begin, end)]
        activations, memory = costs.held(slot, begin, end)
        yield StageSummary(
            rank=slot.rank,
            first=names[0],
            last=names[-1],
            num_layers=len(names),
            time_s=layers.seconds(costs.time(slot, begin, end)),
            parameter_bytes=int(layers.parameter_bytes[members].sum()),
            activation_bytes=activations,
            memory_bytes=memory,
            bytes_in=int(cuts.sent_bytes[begin]),
            bytes_out=int(cuts.sent_bytes[end]),
            num_parameters=int(layers.num_parameters[members].sum()),
            num_recomputed=chosen.count("recompute"),
            num_offloaded=chosen.count("offload"),
        )


def _bottleneck(costs: _StageCosts, stages: list[list[Any]], solution: PartitionSolution) -> tuple[str, str]:
    """Return two texts: the name of the bottleneck (stage, rank or cut), and why no other partition is much faster."""
    problem = costs.problem
    ticks = costs.found.bottleneck
    if problem.layout.shares_ranks:
        return _busiest(costs), f"cuts were moved until no move made the busiest rank faster; {_lower(problem)}"
    bound = _lower(problem)
    for stage, (slot, begin, end) in enumerate(costs.stages):
        if costs.time(slot, begin, end) == ticks:
            at = f"stage {stage} ({span(stages[stage])})"
            moves = [] if costs.found.chosen else list(_moves(costs, stage))
            break
    else:
        stage = next(at for at, (_, _, end) in enumerate(costs.stages) if costs.transfer.ticks[end] == ticks)
        at = f"the cut after stage {stage} ({quote_bytes(costs.cuts.sent_bytes[costs.stages[stage][2]])} each way)"
        moves = []
    if not solution.exact and costs.found.chosen:
        return at, (
            f"the split may not be optimal, because the search merged nearly equal choices of layers to recompute or "
            f"offload; {bound}"
        )
    if not solution.exact:
        return at, f"the split may not be optimal, because the search did not try all orders of the layers; {bound}"
    if ticks == problem.lower:
        return at, bound
    what = (
        f"all splits of the graph ({solution.ideals} different sets of layers can precede a cut)"
        if solution.ideals
        else "all splits of the chain"
    )
    searched = f"{what} were searched" + (
        ", with every choice of layers to recompute or offload" if costs.found.chosen else ""
    )
    return at, "; ".join(
        [*moves, searched, f"{bound}, which is {1 - problem.lower / ticks:.1%} less than the bottleneck"]
    )


def _busiest(costs: _StageCosts) -> str:
    """Describe the bottleneck of a partition in which ranks have several stages: a rank or a cut."""
    loads: dict[int, int] = {}
    for slot, begin, end in costs.stages:
        loads[slot.rank] = loads.get(slot.rank, 0) + costs.time(slot, begin, end)
    rank = max(loads, key=lambda rank: (loads[rank], -rank))
    if loads[rank] < costs.found.bottleneck and not costs.found.chosen:
        return "a cut between two ranks"
    of_rank = [str(stage) for stage, (slot, _, _) in enumerate(costs.stages) if slot.rank == rank]
    return f"rank {rank} (stages {', '.join(of_rank)})"


def _lower(problem: CutProblem) -> str:
    """Return a text that explains the lower bound on the bottleneck."""
    layers = problem.blocks.layers
    ranks = problem.layout.ranks
    even = -(-int(layers.ticks.sum()) // sum(rank.speed for rank in ranks))
    if problem.lower == even:
        return f"all work divided equally would take {quote_time(layers.seconds(even))} on each of {len(ranks)} ranks"
    return _alone(problem, problem.heaviest, quote_time(layers.seconds(problem.lower)))


def _named(problem: CutProblem, block: int) -> str:
    """Return the name of a block's first layer, and the number of other layers in the block."""
    members = problem.blocks.members[block]
    first = f"layer {problem.blocks.layers.names[members[0]]}"
    others = counted(len(members) - 1, "layer")
    return first if len(members) == 1 else f"{first} and {others} that must be in the same stage"


def _alone(problem: CutProblem, block: int, time: str) -> str:
    """Return a text with the time of one block."""
    alone = len(problem.blocks.members[block]) == 1
    return f"{_named(problem, block)} {f'alone takes {time}' if alone else f'take {time} together'}"


def _moves(costs: _StageCosts, stage: int) -> Iterator[str]:
    """Yield texts that say how long stages would take if the first or last block of ``stage`` moved to a neighbour.

    If the stage has only one block, yields the time of this block instead.
    """
    slot, begin, end = costs.stages[stage]
    seconds = costs.problem.blocks.layers.seconds
    blocks = costs.found.order
    if end - begin < 2:
        yield _alone(costs.problem, blocks[begin], quote_time(seconds(costs.time(slot, begin, end))))
        return
    if stage:
        other, first, _ = costs.stages[stage - 1]
        time = max(costs.time(other, first, begin + 1), costs.time(slot, begin + 1, end))
        moved = _named(costs.problem, blocks[begin])
        slower = f"the slower of the two stages take {quote_time(seconds(time))}"
        yield f"moving {moved} to stage {stage - 1} would make {slower}"
    if stage + 1 < len(costs.stages):
        other, _, last = costs.stages[stage + 1]
        time = max(costs.time(other, end - 1, last), costs.time(slot, begin, end - 1))
        moved = _named(costs.problem, blocks[end - 1])
        slower = f"the slower of the two stages take {quote_time(seconds(time))}"
        yield f"moving {moved} to stage {stage + 1} would make {slower}"
