"""Trial runs: measures how long `tune` takes for 48 layers on eight ranks if it also runs plans.

    python benchmarks/trial_runs.py [--width 64]

The model is a GPT: an embedding, 46 blocks and a head. The eight ranks are threads of one process that share the cores
of this machine, so a step takes seconds. `tune` measures the layers, searches, runs plans, and searches again.
"""

import argparse
import time
from statistics import median
from typing import Any

import torch
from best_of_torch import gpt_of
from measure import keep_freed_memory, machine
from torch.nn import functional

import pipesched
from pipesched import Pipeline

RANKS, MICROBATCHES, ROWS, TOKENS, VOCABULARY = 8, 16, 2, 32, 4096


def main() -> None:
    """Print the time that `tune` takes, the steps that it ran, and the step time of its plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64)
    width = parser.parse_args().width
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(machine())
    model = gpt_of(46, width, VOCABULARY)
    x, y = torch.randint(VOCABULARY, (2, ROWS * MICROBATCHES, TOKENS))
    shared: dict[str, Any] = {"loss_fn": functional.cross_entropy, "devices": ["cpu"] * RANKS}
    begin = time.perf_counter()
    plan = pipesched.tune(
        model,
        x[:ROWS],
        target=y[:ROWS],
        batch_size=len(x),
        num_microbatches=MICROBATCHES,
        all_ranks=True,
        **shared,
    )
    tune_s = time.perf_counter() - begin
    ran = {other.measured_s for other in plan.alternatives} - {None}  # a plan may have two labels
    steps_s = []
    with Pipeline(model, x[:ROWS], plan=plan, **shared) as pipe:
        for _ in range(4):
            begin = time.perf_counter()
            pipe.step(x, target=y)
            steps_s.append(time.perf_counter() - begin)
    stages = [len(stage) for stage in plan.stages]
    print(f"tune took {tune_s:.1f} s, ran {len(ran)} plans, and chose {plan.schedule}, {stages} layers")
    print(f"a step takes {median(steps_s[1:]):.2f} s; predicted: {plan.alternatives[0].step_s:.2f} s")


if __name__ == "__main__":
    main()
