"""Hidden reductions: predicts and measures how much of the gradient sums lies in bubbles or overlaps with compute.

    python benchmarks/hidden_reductions.py [--steps 14] [--replicas 2] [--schedules 1f1b zb-h1]

A pipeline of four ranks with two replicas runs steps of 8 micro-batches on 8 processes. Stages and sums over replicas
sleep in place of computing and sending. The sums of a stage together take 90 % of the time of one of its backward
passes, as over a slow link. The prediction simulates the program with the times of each kind of action in the first
half of the steps; the other half is measured. The script prints the predicted and the measured makespan. For each rank
it divides the time of the sums into three shares: in bubbles, "under compute" (while the rank computes), and after the
last backward pass of all ranks.

Under 1f1b the script also states whether three targets are met: the makespan is at most 1.03 times the prediction; on
ranks 1 to 3, at least 90 % of the time of the sums lies in bubbles; on rank 0, all sums but one start before the rank's
last backward ends.
"""

import argparse
import time
from statistics import median
from typing import Any

import torch
from measure import in_ranks, machine
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from pipesched import Pipeline, Trace, simulate
from pipesched.program.actions import Kind
from pipesched.runtime.reductions.replica_sum import ReplicaGroup
from pipesched.simulation.comparison import measured_costs

_RANKS, _MICROBATCHES, _LAYERS = 4, 8, 4
_LAYER_S = 0.01  # of a layer's forward; its backward takes twice as long
_BUCKET_S = 0.9 * 2 * _LAYER_S


class Sleeping(nn.Module):
    """A layer with a weight. Its forward and backward sleep instead of computing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self.weight)  # type: ignore[no-untyped-call,no-any-return]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        time.sleep(_LAYER_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(2 * _LAYER_S)
        return grad, torch.ones_like(*ctx.saved_tensors)


def slow_links() -> None:
    """Patch the sums over replicas: each sleeps for as long as it would take over a slow link."""
    add = ReplicaGroup.add

    def slowed(group: ReplicaGroup, buffer: Tensor) -> None:
        begin = time.perf_counter()
        add(group, buffer)
        time.sleep(max(0, begin + _BUCKET_S - time.perf_counter()))

    ReplicaGroup.add = slowed  # type: ignore[method-assign]


def in_rank(group: Any, schedule: str, replicas: int, steps: int) -> tuple[list[Trace], Trace]:
    """Run steps on one rank; return the traces of its replica, and the predicted trace."""
    slow_links()
    mesh = init_device_mesh("cpu", (replicas, _RANKS), mesh_dim_names=("dp", "pp"))
    model = nn.Sequential(*(Sleeping() for _ in range(_RANKS * _LAYERS)))
    x = torch.randn(_MICROBATCHES, 8)
    boundaries = list(range(_LAYERS, _RANKS * _LAYERS, _LAYERS))
    options: dict[str, Any] = {"schedule": schedule, "num_microbatches": _MICROBATCHES, "boundaries": boundaries}
    with Pipeline(model, x[:1], loss_fn=nn.functional.mse_loss, mesh=mesh, seed=0, **options) as pipe:
        traces = []
        for _ in range(steps + 2):
            pipe.step(x, target=x)
            traces.append(pipe.gather_trace())
        warm = [trace for trace in traces[2:] if trace is not None]
        costs = measured_costs(warm[: steps // 2], _RANKS)
        return warm[steps // 2 :], simulate(pipe._running.assembly.programs.full.timed, costs)


def line(name: str, traces: list[Trace]) -> str:
    """Return a line with medians over the traces: the makespan, and the three shares of each rank's sums."""
    parts = []
    for rank in range(_RANKS):
        times = [trace.communication_times[rank] for trace in traces]
        shares = [
            median([part / own.total_s for part, own in zip(column, times, strict=True)])
            for column in zip(*times, strict=True)
        ]
        parts.append(f"rank {rank}: " + " / ".join(f"{share:.0%}" for share in shares))
    return f"  {name:<10}{median([trace.makespan_s for trace in traces]) * 1e3:8.1f} ms   {'   '.join(parts)}"


def under_last_backward(trace: Trace) -> int:
    """Return the number of sums of rank 0 that start before its last backward ends."""
    own = [span for span in trace.spans if span.rank == 0]
    end_s = max(span.end_s for span in own if span.action.kind is Kind.B)
    return sum(span.action.kind is Kind.REDUCE and span.start_s < end_s for span in own)


def targets(traces: list[Trace], predicted: Trace) -> str:
    """Return a line that says whether the targets are met, with the figures."""
    ratio = median([trace.makespan_s for trace in traces]) / predicted.makespan_s
    times = [trace.communication_times[rank] for trace in traces for rank in range(1, _RANKS)]
    share = min(own.in_bubbles_s / own.total_s for own in times)
    begun = min(map(under_last_backward, traces))
    met = ratio <= 1.03 and share >= 0.9 and begun >= _LAYERS - 1
    return (
        f"  targets {'met' if met else 'MISSED'}: measured / predicted makespan: {ratio:.3f} (target: at most 1.03); "
        f"share of the time of gradient sums that is in bubbles, smallest of ranks 1 to {_RANKS - 1}: {share:.0%} "
        f"(target: at least 90%); gradient sums of rank 0 that start before its last backward ends: {begun} "
        f"(target: at least {_LAYERS - 1} of {_LAYERS})"
    )


def main() -> None:
    """Run all schedules and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb-h1"])
    args = parser.parse_args()
    print(machine())
    print("makespan; time of each rank's gradient sums in bubbles / while computing / after the last backward pass")
    for schedule in args.schedules:
        traces, predicted = in_ranks(args.replicas * _RANKS, in_rank, schedule, args.replicas, args.steps)[0]
        print(f"{schedule}, {args.replicas} replicas")
        print(line("predicted", [predicted]))
        print(line("measured", traces), flush=True)
        print(f"  measured / predicted: {median([trace.makespan_s for trace in traces]) / predicted.makespan_s:.3f}")
        if schedule == "1f1b":
            print(targets(traces, predicted), flush=True)


if __name__ == "__main__":
    main()
