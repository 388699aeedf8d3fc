"""Published: plans for six published models on 64 to 1,024 GPUs, beside the layouts that the papers report.

    python benchmarks/published.py [--models gpt-3-175b ...] [--hosts a100 h100] [--ranks 64 256 1024] [--no-papers]
        [--tensor 1 2 4 8] [--sequence-parallel]
    python benchmarks/published.py --write      # computes the tables in benchmarks/published again

All figures are simulated. `published_models` computes the tables of layers from the shapes in the papers. A rank is a
GPU. The hosts are DGX A100 and DGX H100: a GPU sends 250 or 375 GB/s with 5 us of latency inside its host (5/6 of
NVLink's 300 and 450 GB/s in one direction), and 25 or 50 GB/s with 10 us to other hosts (network cards of 200 and 400
Gb/s). A parameter takes 2 bytes, its gradient 2 bytes, and Adam's states with the float32 weight 12 bytes. A rank may
use 90 % of its memory. Up to 8 GPUs may split each layer (tensor parallelism), as far as they divide the heads.

The first table shows the plans of `pipesched.tune_profile(axes="auto", tensor=(1, 2, 4, 8))`, which `pipesched tune
--table --replicas auto --tensor 1,2,4,8` finds too, and the time to find each, without the searches for advice. "whole
layers" is the fastest step without split layers among the divisions that the search compared. "MFU" is the share of the
peak of bf16 products; recomputed operations do not count, and half of causal attention is left out. Memory is that of a
GPU.

The second table compares layouts of papers with plans for the same GPUs and batch. A paper's layout is simulated with
the same tables, stages with equal numbers of layers, and the fastest number of chunks for which it fits into memory.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from planners import even
from published_models import FOLDER, HOSTS, MODELS, Host, PublishedModel, tables

from pipesched import Profile, schedules
from pipesched.planning.axes_search import AxesRequest
from pipesched.planning.candidate_evaluation import CandidateEvaluator
from pipesched.planning.candidates import Candidate
from pipesched.planning.effort import SearchEffort
from pipesched.planning.evaluated_candidate import EvaluatedCandidate
from pipesched.planning.plan import Plan
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.profile_search import ProfileSearch

RANKS = (64, 256, 1024)
LIMIT_BYTES = int(0.9 * 80e9)  # of a GPU


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout that a paper reports, on a kind of host: pipelines of ``depth`` groups with one row a micro-batch."""

    source: str
    host: str
    num_gpus: int
    #: The number of GPUs that split each layer, and the number of such groups in a pipeline.
    tensor: int = 8
    depth: int
    zero: int
    #: Whether the layers are recomputed.
    recomputes: bool
    #: The reported TFLOP/s of a GPU, and the factor by which they exceed those without recomputation.
    teraflops: float
    counted: float = 1.0
    #: Whether the GPUs of a group also divide the sequence.
    sequence_parallel: bool = False

    @property
    def replicas(self) -> int:
        return self.num_gpus // (self.tensor * self.depth)


LAYOUTS = {
    "gpt-3-175b": [
        Layout(
            source="Narayanan et al. 2021, table 2",
            host="a100",
            num_gpus=gpus,
            depth=12,
            zero=0,
            recomputes=True,
            teraflops=rate,
            counted=4 / 3,
        )
        for gpus, rate in ((384, 153), (768, 149), (1536, 141))
    ],
    "llama-3-70b": [
        Layout(
            source="Dubey et al. 2024, table 4, for 405B",
            host="h100",
            num_gpus=gpus,
            depth=16,
            zero=2,
            recomputes=False,
            teraflops=rate,
            sequence_parallel=True,
        )
        for gpus, rate in ((8192, 430), (16_384, 400))
    ],
}

#: Figures that the papers report, and how their runs differ from the simulated ones.
REPORTED = {
    "gpt-3-175b": (
        "Narayanan et al. 2021 count recomputed operations in their TFLOP/s; the step follows from the rate. Memory is "
        "not reported. Their rate is measured, with kernels of 2021; the tables assume 60 % of the peak for each "
        "product, and attention that stores no scores, and leave out the time of launches and of the optimizer's host."
    ),
    "llama-3-70b": (
        "Dubey et al. 2024 report layouts and 38 to 43 % MFU for 405B only, which splits more layers (126) of twice "
        "the width over the same groups of 8 GPUs and 16 stages, and shards weights by FSDP. The step is the one that "
        "70B would take at that rate. Memory is not reported."
    ),
    "mixtral-8x7b": "Jiang et al. 2024: not reported (neither the batch, the devices, the layout nor the speed).",
    "vit-22b": (
        "Dehghani et al. 2023 report 54.9 % MFU on TPU v4, with weights and activations split over the chips and "
        "asynchronous products, without a pipeline: other devices, and another way to split. Memory is not reported."
    ),
    "t5-11b": "Raffel et al. 2020: not reported (TPU pods with model and data parallelism; no layout, no speed).",
    "sdxl-unet": "Podell et al. 2023: not reported (neither the devices, the layout nor the speed).",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a number of ranks of one kind of host."""

    name: str
    kind: str
    num_ranks: int
    #: The numbers of GPUs that may split each layer.
    tensor: tuple[int, ...] = (1, 2, 4, 8)
    sequence_parallel: bool = False

    @property
    def model(self) -> PublishedModel:
        return MODELS[self.name]

    @property
    def host(self) -> Host:
        return HOSTS[self.kind]

    @property
    def profile(self) -> Profile:
        return Profile.from_table(FOLDER / f"{self.name}-{self.kind}.csv", bytes_per_parameter=2)

    def mfu(self, step_s: float) -> float:
        """Return the share of the peak that a step of this time reaches."""
        return self.model.flops(self.host) / (step_s * self.num_ranks * self.host.device.peak_per_s)

    def plan(self) -> Plan:
        """Return the plan of the search."""
        return ProfileSearch(
            profile=self.profile,
            num_ranks=self.num_ranks,
            batch_size=self.model.batch,
            memory_limit_bytes=LIMIT_BYTES,
            links=self.model.links(self.host, self.num_ranks),
            axes="auto",
            tensor=tuple(size for size in self.tensor if size in self.model.tensor),
            sequence_parallel=self.sequence_parallel,
        ).find()

    def laid_out(self, layout: Layout) -> EvaluatedCandidate | None:
        """Return the fastest plan with a paper's layout that fits into memory; None if none fits."""
        profile = self.profile
        request = AxesRequest(
            profile=profile,
            num_ranks=self.num_ranks,
            batch_size=self.model.batch,
            request=PlanRequest(),
            axes={"pipeline": layout.depth, "replicate": layout.replicas, "tensor": layout.tensor},
            zero=layout.zero,
            sequence_parallel=layout.sequence_parallel,
            memory_limit_bytes=LIMIT_BYTES,
            links=self.model.links(self.host, self.num_ranks),
            options={"ranks_are": "processes"},
        )
        evaluator = CandidateEvaluator(next(request.searches()), SearchEffort(inf))
        fits = [
            found
            for found in _variants(evaluator, profile.layers, layout, self.model.batch // layout.replicas)
            if not any(found.excess_bytes)
        ]
        return min(fits, key=lambda found: found.step_s, default=None)


def _variants(
    evaluator: CandidateEvaluator, names: tuple[str, ...], layout: Layout, count: int
) -> Iterator[EvaluatedCandidate]:
    """Yield the plans with a paper's layout, one for each number of chunks that divides the layers evenly."""
    blocks = len(names) - 2  # without the embedding and the head
    for chunks in range(1, 9):
        num_stages = layout.depth * chunks
        if blocks % num_stages or (chunks > 1 and count % layout.depth):
            continue
        starts = [0, *(1 + start for start in even(blocks, num_stages)[1:])]
        stages = tuple(names[start:end] for start, end in zip(starts, [*starts[1:], len(names)], strict=True))
        schedule = schedules.get("1f1b")
        if chunks > 1:
            schedule = schedules.get("interleaved-1f1b").with_options(chunks_per_rank=chunks)
        plain = Candidate(schedule=schedule, num_ranks=layout.depth, num_microbatches=count, splits=False)
        recomputed = dict.fromkeys(names[1:-1], "recompute") if layout.recomputes else "never"
        yield evaluator.evaluated(plain.recomputing(recomputed), stages)


# ---- tables ---------------------------------------------------------------------------------------------------------

PLANS = (
    *("model", "host", "GPUs", "planning", "axes", "schedule"),
    *("micro-batches", "checkpoint", "step", "whole layers", "memory", "MFU"),
)
PAPERS = ("model", "GPUs", "layout", "step", "memory", "MFU")


def plan_cells(case: Case) -> list[str]:
    """Return the cells of a plan's row."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    plan = case.plan()
    took_s, cpu_s = time.perf_counter() - begin, time.process_time() - begin_cpu
    own = plan.alternatives[0]
    rows = case.model.batch // (own.num_replicas or 1) // own.num_microbatches
    chunks = f", {own.chunks_per_rank} chunks" if own.chunks_per_rank > 1 else ""
    whole = min((other.step_s for other in plan.alternatives if other.tensor_size is None), default=None)
    took = f"{took_s:.1f} s ({cpu_s:.1f} s CPU)"
    return [
        *(case.name, case.kind, str(case.num_ranks), took, own.label, own.schedule + chunks),
        *(f"{own.num_microbatches} of {rows}", own.checkpoint, f"{own.step_s:.3f} s"),
        *("not among them" if whole is None else f"{whole:.3f} s", f"{own.peak_bytes / 1e9:.1f} GB"),
        f"{case.mfu(own.step_s):.1%}",
    ]


def paper_rows(name: str, layout: Layout, tensor: tuple[int, ...]) -> Iterator[list[str]]:
    """Yield the rows of a paper's layout: as reported, simulated, and our plan for the same GPUs."""
    case = Case(
        name=name,
        kind=layout.host,
        num_ranks=layout.num_gpus,
        tensor=tensor,
        sequence_parallel=layout.sequence_parallel,
    )
    gpus = str(layout.num_gpus)
    reached = layout.teraflops / layout.counted * 1e12
    step_s = case.model.flops(case.host) / (layout.num_gpus * reached)
    axes = f"t {layout.tensor} x p {layout.depth} x d {layout.replicas}"
    reported = f"{layout.teraflops:.0f} TFLOP/s"
    yield [
        *(name, gpus, f"{axes}, reported: {reported} ({layout.source})", f"{step_s:.2f} s (from the rate)"),
        *("not reported", f"{case.mfu(step_s):.1%}"),
    ]
    found = case.laid_out(layout)
    if found is None:
        yield [name, gpus, f"{axes}, simulated", "exceeds the memory", "", ""]
    else:
        chunks = f"{found.candidate.schedule.name}, {found.candidate.schedule.chunks_per_rank} chunks"
        memory = f"{max(found.peak_bytes) / 1e9:.1f} GB"
        yield [
            *(name, gpus, f"{axes}, simulated: {chunks}", f"{found.step_s:.2f} s", memory),
            f"{case.mfu(found.step_s):.1%}",
        ]
    own = case.plan().alternatives[0]
    chunks = f"{own.schedule}, {own.chunks_per_rank} chunks, {own.checkpoint}"
    memory = f"{own.peak_bytes / 1e9:.1f} GB"
    yield [
        *(name, gpus, f"our plan, simulated: {own.label}, {chunks}", f"{own.step_s:.2f} s", memory),
        f"{case.mfu(own.step_s):.1%}",
    ]


def show(cells: tuple[str, ...] | list[str]) -> None:
    """Print a row of a table."""
    print(f"| {' | '.join(cells)} |", flush=True)


def show_heads(heads: tuple[str, ...]) -> None:
    """Print the first two lines of a table."""
    show(heads)
    print(f"|{'---|' * len(heads)}")


def main() -> None:
    """Print the plans, and the comparisons with papers; with --write, write the tables instead."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--hosts", nargs="*", choices=list(HOSTS), default=list(HOSTS))
    parser.add_argument("--ranks", nargs="*", type=int, default=RANKS)
    parser.add_argument("--tensor", nargs="*", type=int, default=(1, 2, 4, 8), help="GPUs that may split each layer")
    parser.add_argument("--sequence-parallel", action="store_true", help="they also divide the sequence")
    parser.add_argument("--no-papers", action="store_true", help="leave out the layouts of papers")
    parser.add_argument("--write", action="store_true", help="write the tables of layers, and plan nothing")
    given = parser.parse_args()
    if given.write:
        for path, text in tables():
            path.write_text(text, encoding="utf-8")
        return
    tensor, splits = tuple(given.tensor), given.sequence_parallel
    show_heads(PLANS)
    for name in given.models:
        for kind in given.hosts:
            for num_ranks in given.ranks:
                case = Case(name=name, kind=kind, num_ranks=num_ranks, tensor=tensor, sequence_parallel=splits)
                show(plan_cells(case))
    if given.no_papers:
        return
    print()
    show_heads(PAPERS)
    for name in given.models:
        for layout in LAYOUTS.get(name, []):
            for cells in paper_rows(name, layout, tensor):
                show(cells)
    print()
    for name in given.models:
        print(f"{name}: {REPORTED[name]}")


if __name__ == "__main__":
    main()
