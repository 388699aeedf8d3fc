"""Writes the files of this folder. It ran with the package at 257681f2, before the first release:

PYTHONPATH=<checkout of 257681f2> python tests/compatibility/write_files.py
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from scaled_model import MICROBATCHES, batch, mean_square, model, momentum, pipeline, trained
from torch import Tensor

import pipesched
from pipesched import Costs, Program, lower, schedules, simulate
from pipesched.program.lowering import (
    add_gathers,
    add_norms,
    add_offloading,
    add_recompute,
    add_reductions,
    add_updates,
)
from pipesched.testing import reference_step

FILES = Path(__file__).parent / "files"


def plain_programs() -> dict[str, Program]:
    """Return programs before lowering that together have all kinds of actions."""
    one_chunk, two_chunks = schedules.get("1f1b").program(2, 4), schedules.get("interleaved-1f1b").program(2, 4)
    split = schedules.get("zb-h1").program(3, 4)
    return {
        "1f1b": one_chunk,
        "sums-and-norms": add_norms(add_updates(add_reductions(one_chunk, [2, 3]))),
        "gathers": add_updates(add_reductions(add_gathers(two_chunks, keep=False), 1)),
        "recomputed": add_recompute(split, "except_last"),
        "offloaded": add_offloading(one_chunk, {0}),
        "pipedream-2bw": schedules.get("pipedream-2bw").program(2, 4),
        "chimera": schedules.get("chimera").program(2, 4),
        "seq1f1b": schedules.get("seq1f1b").program(2, 2),
    }


def write_programs() -> dict[str, float]:
    """Write each program before and after lowering; return the simulated steps."""
    makespans = {}
    for name, program in plain_programs().items():
        (FILES / "programs" / f"{name}.txt").write_text(str(program))
        (FILES / "programs" / f"{name}.lowered.txt").write_text(str(lower(program)))
        makespans[name] = simulate(lower(program), uniform(program)).makespan_s
    return makespans


def uniform(program: Program) -> Costs:
    return Costs.uniform(program.num_stages, forward_s=2, input_grad_s=3, weight_grad_s=2, transfer_s=1)


def write_plans(profile: pipesched.Profile) -> None:
    """Write plans of every form: with a digest, a program, layers that are recomputed, replicas, and without costs."""
    two: dict[str, Any] = {"num_ranks": 2, "batch_size": 8, "num_microbatches": MICROBATCHES, "all_ranks": True}
    layers = {"1": "recompute", "2": "offload", "4": "recompute-cheap"}
    axes: dict[str, Any] = {**two, "num_ranks": 4, "batch_size": 16, "axes": {"pipeline": 2, "replicate": 2}}
    plans = {
        "1f1b": pipesched.tune(profile, **two, schedule="1f1b"),
        "searched": pipesched.tune(profile, **two, schedule="searched", effort=3_000),
        "layers": pipesched.tune(profile, **two, schedule="zb-v", checkpoint=layers),
        "zero-0": pipesched.tune(profile, **axes, schedule="1f1b", zero=0),
        "zero-2": pipesched.tune(profile, **axes, schedule="interleaved-1f1b", zero=2),
        "zero-3": pipesched.tune(profile, **axes, schedule="1f1b", zero=3),
    }
    with pipeline(devices=["cpu"] * 2, schedule="zb-h1", num_microbatches=4, boundaries=[2]) as pipe:
        plans["unmeasured"] = pipe.plan
    for name, plan in plans.items():
        plan.save(FILES / "plans" / f"{name}.json")


def replicated() -> dict[str, Tensor]:
    """Return the results of two steps of two replicas, in a plain loop."""
    loop = model()
    optimizer, losses = momentum(loop.parameters()), []
    for step in range(2):
        x, y = (torch.cat([rows, rows.flip(0)]) for rows in batch(step))
        options: dict[str, Any] = {"num_microbatches": 4, "num_replicas": 2, "step": step, "seed": 3}
        loss = reference_step(loop, x, loss_fn=mean_square, target=y, loss_reduction="mean", **options)
        losses.append(loss)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": torch.stack(losses), **{name: weight.detach() for name, weight in loop.named_parameters()}}


def main() -> None:
    """Write the files, and the results that today's code must give for them."""
    for folder in ("plans", "programs", "results"):
        (FILES / folder).mkdir(parents=True, exist_ok=True)
    microbatches = [pipesched.Microbatch(batch(0)[0][:rows], target=batch(0)[1][:rows]) for rows in (1, 2, 4)]
    profile = pipesched.profile(
        model(), batch(0)[0][:2], loss_fn=mean_square, target=batch(0)[1][:2], optimizer=momentum, rows=[2, 4],
        microbatches=microbatches,
    )  # fmt: skip
    profile.save(FILES / "profile.json")
    stages = [["0", "1", "2"], ["3", "4", "5"]]
    write_plans(profile)
    costs = profile.costs(stages, 3)
    results = {"costs": costs.to_dict(), "makespans": write_programs()}
    (FILES / "results" / "numbers.json").write_text(json.dumps(results, indent=1) + "\n")
    with pipeline(devices=["cpu"] * 2, schedule="1f1b", num_microbatches=4, boundaries=[3]) as pipe:
        save_file(trained(pipe, range(2)), FILES / "results" / "two-steps.safetensors")
        (FILES / "trace.json").write_text(json.dumps(pipe.trace.to_dict()) + "\n")
        pipe.trace.to_chrome(FILES / "trace.chrome.json")
        pipe.save(FILES / "checkpoint")
        save_file(trained(pipe, range(2, 4)), FILES / "results" / "four-steps.safetensors")
    save_file(replicated(), FILES / "results" / "two-replicas.safetensors")


if __name__ == "__main__":
    main()
