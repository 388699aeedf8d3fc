"""Axes: the divisions of ranks into pipelines and replicas that pipesched and Megatron-LM's rules of thumb choose.

    python benchmarks/axes.py [--models 1.7 18 145]

The models are the GPTs of 1.7, 18 and 145 billion parameters of Table 1 of Narayanan et al. 2021 (arXiv:2104.04473),
with the table's numbers of GPUs and its batches of sequences of 2,048 tokens. In this comparison, a rank is a group of
t GPUs (1, 8 and 8, as in the table) that share the work and the memory of each layer. The times of the layers contain
the all-reduces inside the group.

All figures are simulated. GPUs are A100s with 80 GB (`cost_tables`), eight in a host. A GPU sends 250 GB/s with 5 us of
latency inside its host, and 25 GB/s with 10 us to other hosts, so a group of 8 GPUs sends 200 GB/s. A parameter
takes 2 bytes, its gradient 2 bytes, and Adam's states with the float32 weight 12 bytes. An update reads or writes 30
bytes for each parameter. A rank may use 90 % of its memory, and may recompute layers.

The planners:

rules     the rules of Megatron-LM (section 3 of the paper): ranks with consecutive numbers are replicas; the pipeline
          is only as deep as the memory requires; all stages have the same number of layers. Every combination of these
          choices is simulated, and the fastest is used: 1, 2, 4 or 8 sequences in a micro-batch; 1F1B, or interleaved
          1F1B with 2 or 4 chunks; all layers recomputed, or none; zero 0 or 1 (Megatron-LM's distributed optimizer).
table 1   the same, but the pipeline is as deep as in Table 1
ours      `pipesched.tune(axes="auto")`
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from cost_tables import A100, WIDE, Layer, embedding, feed_forward, head, self_attention, table
from planners import even

from pipesched import Link, Links, Profile, schedules
from pipesched.planning.axes_search import AxesRequest, Zero, find_axes
from pipesched.planning.candidate_evaluation import CandidateEvaluator
from pipesched.planning.candidates import Candidate
from pipesched.planning.effort import SearchEffort
from pipesched.planning.evaluated_candidate import EvaluatedCandidate
from pipesched.planning.plan import Plan
from pipesched.planning.plan_request import PlanRequest
from pipesched.simulation.communication import communication

TOKENS = 2048
VOCABULARY = 51_200
HOST = 8  # GPUs
INSIDE = Link(5e-6, 250e9)
BETWEEN = Link(10e-6, 25e9)
LIMIT_BYTES = int(0.9 * 80e9)  # of a GPU
SIZES = (1, 2, 4, 8)  # sequences in a micro-batch
STATE_BYTES = 12
UPDATE_BYTES = 30  # weights, gradients and states, read or written


@dataclass(frozen=True)
class Gpt:
    """A row of Table 1."""

    name: str
    layers: int
    width: int
    heads: int
    gpus: int
    batch: int
    group: int  # tensor-parallel GPUs
    depth: int  # ranks of a pipeline in the paper

    @property
    def num_ranks(self) -> int:
        return self.gpus // self.group

    @property
    def links(self) -> Links:
        between = replace(BETWEEN, bytes_per_s=self.group * 25e9)
        return Links.of_hosts(HOST // self.group, self.num_ranks, inside=INSIDE, between=between)

    @property
    def limit_bytes(self) -> int:
        return self.group * LIMIT_BYTES

    @property
    def profile(self) -> Profile:
        """Return the costs of the layers on a group of GPUs, for each micro-batch size."""
        graphs = {}
        for size in SIZES:
            graph = table(self._layers(size * TOKENS))
            for name, node in graph.nodes.items():
                inside_s = 2 * self._all_reduce_s(size) * name.startswith("layers.")
                for column in ("forward_s", "input_grad_s", "weight_grad_s", "backward_s"):
                    node[column] /= self.group
                    node[column] += 0 if column == "weight_grad_s" else inside_s
                node["optimizer_bytes"] = STATE_BYTES * node["num_parameters"]
                node["update_s"] = UPDATE_BYTES * node["num_parameters"] / A100.bytes_per_s / self.group
            graphs[size] = graph
        return Profile(graphs)

    def _layers(self, rows: int) -> Iterator[Layer]:
        width, given = self.width, rows * self.width * WIDE
        block = self_attention(rows, TOKENS, width, self.heads, width // self.heads, self.heads, causal=True)
        block += feed_forward(rows, width, 4 * width, gated=False)
        yield Layer("embedding", embedding(rows, width, VOCABULARY), given)
        for layer in range(self.layers):
            yield Layer(f"layers.{layer}", block, given)
        yield Layer("head", head(rows, width, VOCABULARY), 4)

    def _all_reduce_s(self, size: int) -> float:
        """Return the time to sum the output of attention or of the feed-forward layer over the group."""
        ring = range(self.group)
        return Links(inside=INSIDE).all_reduce_s(size * TOKENS * self.width * WIDE, ring) if self.group > 1 else 0.0


MODELS = {
    "1.7": Gpt("1.7 B, 32 GPUs", 24, 2304, 24, 32, 512, 1, 1),
    "18": Gpt("18 B, 256 GPUs", 40, 6144, 48, 256, 1024, 8, 1),
    "145": Gpt("145 B, 1536 GPUs", 80, 12288, 96, 1536, 2304, 8, 8),
}

# ---- the planners ---------------------------------------------------------------------------------------------------


def request(model: Gpt, profile: Profile, depth: int | None = None, zero: Zero = "auto") -> AxesRequest:
    """Return the request for a plan with pipelines of ``depth`` ranks, or of any depth if ``depth`` is None."""
    return AxesRequest(
        profile=profile,
        num_ranks=model.num_ranks,
        batch_size=model.batch,
        request=PlanRequest(),
        axes="auto" if depth is None else {"pipeline": depth, "replicate": model.num_ranks // depth},
        zero=zero,
        memory_limit_bytes=model.limit_bytes,
        links=model.links,
        options={"ranks_are": "processes"},
    )


def rules(model: Gpt, profile: Profile) -> EvaluatedCandidate:
    """Return the fastest plan that the rules allow with the smallest pipeline depth that fits into memory."""
    depths = [depth for depth in range(1, model.num_ranks + 1) if model.num_ranks % depth == 0]
    return next(filter(None, (of_depth(model, profile, depth) for depth in depths)))


def of_depth(model: Gpt, profile: Profile, depth: int) -> EvaluatedCandidate | None:
    """Return the fastest plan that the rules allow with this pipeline depth; None if no plan fits into memory."""
    if model.layers % depth or model.batch % (model.num_ranks // depth):
        return None
    fits = [found for found in by_the_rules(model, profile, depth) if not any(found.excess_bytes)]
    return min(fits, key=lambda found: found.step_s, default=None)


def by_the_rules(model: Gpt, profile: Profile, depth: int) -> Iterator[EvaluatedCandidate]:
    """Yield the plans that the rules allow with this pipeline depth, including plans that do not fit into memory."""
    rows = model.batch * depth // model.num_ranks
    names = profile.layers
    for zero in (0, 1) if depth < model.num_ranks else (0,):
        search = [*request(model, profile, depth, zero).searches()][-1]  # the last one has consecutive replicas
        evaluator = CandidateEvaluator(search, SearchEffort(inf))
        for count in (rows // size for size in SIZES if rows % size == 0):
            for chunks in (1, 2, 4) if depth > 1 else (1,):
                num_stages = depth * chunks
                if model.layers % num_stages or (chunks > 1 and count % depth):
                    continue
                starts = [0, *(1 + start for start in even(model.layers, num_stages)[1:])]
                ends = [*starts[1:], len(names)]
                stages = tuple(names[start:end] for start, end in zip(starts, ends, strict=True))
                schedule = schedules.get("1f1b")
                if chunks > 1:
                    schedule = schedules.get("interleaved-1f1b").with_options(chunks_per_rank=chunks)
                plain = Candidate(schedule=schedule, num_ranks=depth, num_microbatches=count, splits=False)
                for kept in ("never", dict.fromkeys(names[1:-1], "recompute")):
                    yield evaluator.evaluated(plain.recomputing(kept), stages)


# ---- rows -----------------------------------------------------------------------------------------------------------

HEADS = [
    "model",
    "planner",
    "axes",
    "schedule",
    "chunks",
    "micro-batch",
    "recomputed",
    "step",
    "memory",
    "bubble",
    "exposed",
]


def row(model: Gpt, planner: str, found: EvaluatedCandidate) -> list[str]:
    """Return the cells of a table row for a plan of the rules."""
    size = model.batch // found.replication.num_replicas // found.candidate.num_microbatches
    own = found.alternative()
    exposed_s = sum(axis.exposed_s for axis in communication(found.runs, found.costs, found.replication))
    return [
        model.name,
        planner,
        found.label,
        own.schedule,
        str(own.chunks_per_rank),
        str(size),
        str(sum(kept == "recompute" for kept in _checkpoint(found.candidate).values())),
        f"{own.step_s:.3f} s",
        f"{own.peak_bytes / model.group / 1e9:.1f} GB",
        f"{own.bubble_ratio:.1%}",
        f"{exposed_s * 1e3:.0f} ms",
    ]


def _checkpoint(candidate: Candidate | Plan) -> dict[str, str]:
    return {} if isinstance(candidate.checkpoint, str) else dict(candidate.checkpoint)


def our_row(model: Gpt, plan: Plan) -> list[str]:
    """Return the cells of a table row for a plan of `pipesched.tune`."""
    own = plan.alternatives[0]
    checkpoint = plan.checkpoint if plan.checkpoint in ("always", "except_last") else ""
    return [
        model.name,
        "ours",
        own.label,
        own.schedule,
        str(own.chunks_per_rank),
        str(model.batch // own.num_replicas // own.num_microbatches),
        checkpoint or str(sum(kept == "recompute" for kept in _checkpoint(plan).values())),
        f"{own.step_s:.3f} s",
        f"{own.peak_bytes / model.group / 1e9:.1f} GB",
        f"{own.bubble_ratio:.1%}",
        f"{sum(axis.exposed_s for axis in plan.communication()) * 1e3:.0f} ms",
    ]


def main() -> None:
    """Print a table with three rows for each model, and the time of each search."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}")
    for name in parser.parse_args().models:
        model = MODELS[name]
        profile = model.profile
        rows = [row(model, "rules", rules(model, profile))]
        fixed = of_depth(model, profile, model.depth)
        rows += [row(model, "table 1", fixed)] if fixed is not None else []
        begin = time.process_time()
        plan = find_axes(request(model, profile))
        took_s = time.process_time() - begin
        rows.append(our_row(model, plan))
        print(*(f"| {' | '.join(cells)} |" for cells in rows), sep="\n", flush=True)
        print(
            f"search: {took_s:.1f} s CPU; next: "
            + "; ".join(f"{a.label} {a.step_s:.3f} s" for a in plan.alternatives[1:4])
        )


if __name__ == "__main__":
    main()
