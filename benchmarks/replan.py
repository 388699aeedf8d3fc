"""Replan: compares step times before and after replanning for a model with blocks that become slower during training.

    python benchmarks/replan.py [--pairs 25] [--steps 6] [--compute]

Four ranks train 16 identical blocks that sleep, as if each rank had its own device; with --compute two ranks train ten
blocks of matrix products. Then the last two blocks take three times as long. The script calls ``pipe.replan()`` before
and after this change, until the call keeps the plan. It then repeats the run with measure=True, so that each call first
measures the layers again. At the end of a run the first and the last plan run in turn, some steps each (A B A B).
``pipe.replan(plan)`` switches between the two plans and is timed as well. Last, the weights are compared with those of
a run that never changed its plan.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import machine, ratio
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Pipeline

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.sleeping_layers import waited

MICROBATCHES = 8


class Block(nn.Module):
    """A block whose work is proportional to its depth."""

    def __init__(self, width: int, sleep_s: float) -> None:
        super().__init__()
        self.depth, self.sleep_s = 1.0, sleep_s
        self.there, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.sleep_s:
            return x + self.back(functional.gelu(self.there(waited(x, self.depth * self.sleep_s))))
        for _ in range(int(self.depth)):
            x = x + self.back(functional.gelu(self.there(x)))
        return x


class Training:
    """A pipeline with momentum SGD that starts with equal stages and trains on the same batch in each step."""

    def __init__(self, compute: bool) -> None:
        torch.manual_seed(0)
        count, ranks, rows, width, sleep_s = (10, 2, 64, 256, 0.0) if compute else (16, 4, 2, 8, 0.002)
        self.blocks = nn.Sequential(*(Block(width, sleep_s) for _ in range(count)))
        self.steps = 0
        self._x = torch.randn(rows * MICROBATCHES, width)
        cut = [count * stage // ranks for stage in range(1, ranks)]
        choices: dict[str, Any] = {"num_microbatches": MICROBATCHES, "seed": 0, "boundaries": cut}
        choices["optimizer"] = lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9)
        self.pipe = Pipeline(
            self.blocks, self._x[:rows], loss_fn=functional.mse_loss, devices=["cpu"] * ranks, **choices
        )

    def train(self, steps: int) -> list[float]:
        """Run steps and return the seconds of each."""
        seconds = []
        for _ in range(steps):
            begin = time.perf_counter()
            self.pipe.step(self._x, target=self._x)
            seconds.append(time.perf_counter() - begin)
        self.steps += steps
        return seconds

    def grow(self) -> None:
        """Make the last two blocks take three times as long."""
        for block in self.blocks[-2:]:
            block.depth = 3.0

    def ask(self, steps: int, measure: bool) -> None:
        """Train ``steps`` steps and call replan, again and again, until replan keeps the plan."""
        for _ in range(4):
            self.train(steps)
            done = self.pipe.replan(measure=measure)
            print(f"    replan({'measure=True' if measure else ''}): {done}")
            if not done.moved:
                return


def compare(pairs: int, steps: int, *, measure: bool, compute: bool) -> None:
    """Run the whole comparison for one way to call replan, and print the results."""
    run = Training(compute)
    pipe = run.pipe
    print("  equal blocks, the same number on each rank:")
    run.ask(steps, measure)
    old, grown_at = pipe.plan, run.steps
    run.grow()
    print("  the last two blocks take three times as long:")
    run.ask(steps, measure)
    new, predicted_s = pipe.plan, pipe.predicted.makespan_s
    took, firsts, befores, afters = [], [], [], []
    for _ in range(pairs):
        for plan, medians in ((old, befores), (new, afters)):
            took.append(pipe.replan(plan).cost_s)
            first, *others = run.train(steps)
            medians.append(median(others))
            firsts.append(first - medians[-1])
    pipe.close()
    found = ratio(befores, afters)
    cuts = [" + ".join(str(len(names)) for names in plan.stages) for plan in (old, new)]
    print(f"  blocks {cuts[0]}: {found.first * 1e3:.2f} ms a step; {cuts[1]}: {found.second * 1e3:.2f} ms", end="")
    print(f" (predicted {predicted_s * 1e3:.2f} ms); before / after {found}")
    first_ms = median(firsts) * 1e3
    print(f"  switching plans takes {median(took) * 1e3:.1f} ms, and lengthens the next step by {first_ms:.1f} ms")
    other = Training(compute)
    for block in other.blocks:
        block.sleep_s *= 1e-6  # this run compares weights, not times
    other.train(grown_at)
    other.grow()
    other.train(run.steps - grown_at)
    other.pipe.close()
    pairs_of = zip(run.blocks.parameters(), other.blocks.parameters(), strict=True)
    equal = all(torch.equal(one, another) for one, another in pairs_of)
    print(f"  weights after {run.steps} steps bit-identical to a run without a change of plan: {equal}")


def main() -> None:
    """Run the comparison for both ways to call replan."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--compute", action="store_true")
    choices = parser.parse_args()
    print(machine())
    for measure in (False, True):
        print("replan(): layer times from the steps" if not measure else "replan(measure=True): layers measured again")
        compare(choices.pairs, choices.steps, measure=measure, compute=choices.compute)


if __name__ == "__main__":
    main()
