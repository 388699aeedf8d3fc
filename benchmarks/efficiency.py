"""Efficiency: the ratio of a measured step to the simulated step and to the lower bound, with 2 ranks that compute.

    python benchmarks/efficiency.py [--steps 25] [--schedules gpipe 1f1b ...] [--executors threads processes]

The model has 16 transformer blocks (d = 256, 64 tokens, 32 rows, m = 8). Ranks are threads, then processes. The time of
a step is its makespan on the common clock of the ranks. To simulate a step, the script uses the median times of each
stage's actions in all steps but this one, and assumes that messages take no time.

The script prints medians over the steps: measured / simulated with a 95 % bootstrap interval, and measured / bound. The
first ratio is the product of two factors. "actions" is the step simulated with this step's own action times, divided by
the simulated step. "between" is the measured step divided by the step simulated with its own action times: it shows the
time lost between actions. The last columns are median gaps: from the end of an action to the start of the next action
of its rank, and from the end of an action on another rank to the start of the action that waits for it.
"""

import argparse
from collections.abc import Sequence
from itertools import chain
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from measure import Delays, delays, in_ranks, machine, ratio
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from versus_torch import blocks

from pipesched import Pipeline, Program, Trace, simulate
from pipesched.program.traversal import Timing, walk
from pipesched.simulation.comparison import measured_costs

RANKS, MICROBATCHES, ROWS = 2, 8, 32
CHUNKS = {"interleaved-1f1b": 2, "interleaved-zb": 2, "zb-v": 2}


def pipeline(name: str, processes: bool) -> tuple[Pipeline, torch.Tensor, torch.Tensor]:
    """Return a pipeline over the transformer blocks, with inputs and targets for its steps."""
    model = blocks(tiny=False)
    x, y = torch.randn(ROWS, 64, 256), torch.randn(ROWS, 64, 256)
    stages = RANKS * CHUNKS.get(name, 1)
    size = len(model) // stages
    options = {"schedule": name, "num_microbatches": MICROBATCHES, "boundaries": list(range(size, len(model), size))}
    where = {"mesh": init_device_mesh("cpu", (RANKS,))} if processes else {"devices": ["cpu"] * RANKS}
    return Pipeline(model, x[: ROWS // MICROBATCHES], loss_fn=functional.mse_loss, **options, **where), x, y


def traces(rank: int, name: str, processes: bool, steps: int) -> tuple[Program, list[Trace]]:
    """Run two warm-up steps, then ``steps`` steps; return the program and the traces of these steps."""
    pipe, x, y = pipeline(name, processes)
    found = []
    with pipe:
        for _ in range(steps + 2):
            pipe.model.zero_grad()
            pipe.step(x, target=y)
            found.append(pipe.gather_trace())
        return pipe.plan.program, found[2:]


class Step(NamedTuple):
    """The times of one step in seconds: measured, simulated, bound, and simulated with the step's own action times."""

    measured_s: float
    simulated_s: float
    bound_s: float
    replayed_s: float
    lost: Delays


def compared(program: Program, all_traces: Sequence[Trace], number: int) -> Step:
    """Compare step ``number`` with a simulation that uses the action times of all other steps."""
    trace = all_traces[number]
    others = [other for at, other in enumerate(all_traces) if at != number]
    simulated = simulate(program, measured_costs(others, program.num_stages))
    nanoseconds = {span.action: round((span.end_s - span.start_s) * 1e9) for span in trace.spans}
    seconds = np.array([nanoseconds[action] for action in program.columns], object)
    walked = walk(program, Timing(seconds, np.zeros(len(program.requirements.row), object)))
    replayed_s = max(walked.ends) * 1e-9
    return Step(trace.makespan_s, simulated.makespan_s, simulated.bound_s or 0, replayed_s, delays(program, trace))


def main() -> None:
    """Print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument(
        "--schedules", nargs="+", default=["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zb", "zb-v"]
    )
    parser.add_argument("--executors", nargs="+", default=["threads", "processes"])
    args = parser.parse_args()
    print(machine())
    print(f"{'':30}{'measured / simulated':>24}{'/ bound':>9}{'actions':>9}{'between':>9}{'ms':>9}{'us between':>20}")
    print(f"{'schedule':18}{'ranks are':12}{'':60}{'on a rank':>10}{'message':>10}")
    for executor in args.executors:
        for name in args.schedules:
            if executor == "threads":
                torch.set_num_threads(1)
                program, found = traces(0, name, False, args.steps)
            else:
                program, found = in_ranks(RANKS, traces, name, True, args.steps)[0]
            steps = [compared(program, found, number) for number in range(len(found))]
            whole = ratio([step.measured_s for step in steps], [step.simulated_s for step in steps])
            bound = median(step.measured_s / step.bound_s for step in steps)
            actions = median(step.replayed_s / step.simulated_s for step in steps)
            between = median(step.measured_s / step.replayed_s for step in steps)
            lost = "".join(f"{median(chain(*kind)) * 1e6:10.0f}" for kind in zip(*(s.lost for s in steps), strict=True))
            figures = f"{bound:9.3f}{actions:9.3f}{between:9.3f}{whole.first * 1e3:9.1f}{lost}"
            print(f"{name:18}{executor:12}{whole!s:>24}{figures}", flush=True)


if __name__ == "__main__":
    main()
