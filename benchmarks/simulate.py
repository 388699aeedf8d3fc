"""Simulate: times building, validating, lowering and simulating programs, up to 1,024 ranks, in pipesched and torch.

pipesched: each shape runs in a fresh process. The script prints the seconds of each part, the numbers of compute and
lowered actions, the actions per second, and the peak memory. torch: ``torch.distributed.pipelining`` builds the same
schedule (its constructor also adds the communication of all ranks) and runs its ``_simulate_comms_compute``; the
actions that this function does not support (UNKNOWN) are removed first. Both run in turn,
pipesched first, each in a fresh process with a time limit. Failures are printed.
"""

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from measure import machine

SHAPES = [  # name, ranks, micro-batches, chunks on each rank, whether to lower
    ("1f1b", 64, 512, 1, True),
    ("interleaved-1f1b", 256, 1024, 2, True),
    ("1f1b", 1024, 4096, 1, False),
]
PEER_SHAPES = [  # name, ranks, micro-batches, chunks on each rank, pairs of runs
    ("interleaved-1f1b", 8, 64, 2, 5),
    ("interleaved-1f1b", 32, 128, 2, 3),
    ("interleaved-1f1b", 64, 256, 2, 1),
    ("1f1b", 64, 512, 1, 1),
    ("interleaved-1f1b", 256, 1024, 2, 1),
]
TORCH = {"interleaved-1f1b": "Interleaved1F1B", "1f1b": "1F1B"}
UNKNOWN = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD", "WAIT_SEND_F", "WAIT_SEND_B")


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Call ``work``; return the seconds that it takes and its result."""
    gc.collect()  # the collection of what imports made would otherwise fall into some of the works, by chance
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def ours(name: str, ranks: int, microbatches: int, chunks: int, lowered: bool) -> dict[str, Any]:
    """Build, validate, lower and simulate a program in pipesched; return the times, the counts and the peak memory."""
    from pipesched import Costs, lower, schedules, simulate, validate

    schedule = schedules.get(name)
    if chunks > 1:
        schedule = schedule.with_options(chunks_per_rank=chunks)
    build, program = timed(lambda: schedule.program(ranks, microbatches))
    check, _ = timed(lambda: validate(program))
    lowering, runs = timed(lambda: lower(program)) if lowered else (0.0, program)
    costs = Costs.uniform(program.num_stages)
    run, trace = timed(lambda: simulate(runs, costs))
    figures, _ = timed(lambda: (trace.makespan_s, trace.bubble_ratio, trace.peak_in_flight))
    return {
        "steps": {"build": build, "validate": check, "lower": lowering, "simulate": run + figures},
        "actions": len(program.columns),
        "all actions": len(runs.columns),
        "makespan": float(trace.makespan_s),
    }


def peer(name: str, ranks: int, microbatches: int, chunks: int) -> dict[str, Any]:
    """Build and simulate the schedule in torch, with the fake stages of torch's own plot tool; return the times."""
    from unittest import mock

    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _simulate_comms_compute, get_schedule_class

    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.submod, stage.num_stages = 0, ranks, None, ranks * chunks
    stages = stage if chunks == 1 else [stage] * chunks
    build, schedule = timed(lambda: get_schedule_class(TORCH[name])(stages, microbatches))
    steps = {"build": build}
    order = getattr(schedule, "pipeline_order_with_comms", None) or schedule.pipeline_order
    known = {
        rank: [a for a in actions if a is not None and a.computation_type.name not in UNKNOWN]
        for rank, actions in order.items()
    }
    print(json.dumps({"steps": steps}), flush=True)  # used if the simulation fails
    steps["simulate"], _ = timed(lambda: _simulate_comms_compute(known, lambda s: s % ranks, ranks * chunks))
    return {"steps": steps, "all actions": sum(map(len, known.values()))}


def in_a_process(who: str, shape: tuple[Any, ...], limit_s: float) -> dict[str, Any]:
    """Run one side in a fresh process and return its result, which is the last line that it prints."""
    command = [sys.executable, __file__, "--run", json.dumps([who, *shape])]
    note = ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        output, error = done.stdout, done.stderr
        if done.returncode:
            note = error.strip().splitlines()[-1][:90] if error.strip() else f"exit code {done.returncode}"
    except subprocess.TimeoutExpired as stopped:
        output = (stopped.stdout or b"").decode()
        note = f"not done after {limit_s:.0f} s"
    lines = [line for line in output.splitlines() if line.startswith('{"steps')]  # torch prints much more
    return {**(json.loads(lines[-1]) if lines else {"steps": {}}), "note": note}


def row(label: str, result: dict[str, Any]) -> str:
    """Return a line of the table."""
    steps, total = result["steps"], sum(result["steps"].values())
    times = "".join(f"{steps[step]:>10.3f}" if step in steps else " " * 10 for step in STEPS)
    rate = f"{result['all actions'] / total:>12,.0f}" if "all actions" in result else " " * 12
    memory = f"{result['memory']:>8.2f}" if "memory" in result else " " * 8
    return f"{label:<38}{times}{total:>10.3f}{rate}{memory}  {result['note']}".rstrip()


STEPS = ("build", "validate", "lower", "simulate")


def medians(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the result whose total time is the median. Its note states the range of all total times."""
    totals = [sum(result["steps"].values()) for result in results]
    middle = sorted(totals)[len(totals) // 2]
    chosen = results[totals.index(middle)]
    return {**chosen, "note": chosen["note"] or f"{min(totals):.3f} to {max(totals):.3f} in {len(totals)}"}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-limit", type=float, default=240, help="time limit for a run of torch, in seconds")
    parser.add_argument("--repeats", type=int, default=3, help="number of runs of pipesched for each shape")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        who, *shape = json.loads(args.run)
        result = (ours if who == "ours" else peer)(*shape)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps({**result, "memory": memory}))
        return
    print(machine())
    head = "".join(f"{step:>10}" for step in (*STEPS, "total"))
    print(f"\n{'seconds':<38}{head}{'actions/s':>12}{'GiB':>8}  range of totals")
    for shape in SHAPES:
        results = [in_a_process("ours", shape, 600) for _ in range(args.repeats)]
        actions = results[0].get("all actions", 0)
        print(row(f"{shape[0]} {shape[1]}x{shape[2]}x{shape[3]} ({actions:,})", medians(results)), flush=True)
    print(f"\n{'seconds, in turn':<38}{head}{'actions/s':>12}{'GiB':>8}")
    for *shape, repeats in PEER_SHAPES:
        pairs = [
            (in_a_process("ours", (*shape, True), 600), in_a_process("peer", tuple(shape), args.peer_limit))
            for _ in range(repeats)
        ]
        label = f"{shape[0]} {shape[1]}x{shape[2]}x{shape[3]}"
        for side, results in zip(("pipesched", "torch"), zip(*pairs, strict=True), strict=True):
            print(row(f"{label} {side}", medians(list(results))), flush=True)
        ratios = [sum(b["steps"].values()) / sum(a["steps"].values()) for a, b in pairs]
        if all("all actions" in b for _, b in pairs):  # otherwise a run failed, and its row shows the reason
            print(f"{'':<38}torch takes {median(ratios):.1f} times as long ({min(ratios):.1f} to {max(ratios):.1f})")


if __name__ == "__main__":
    main()
