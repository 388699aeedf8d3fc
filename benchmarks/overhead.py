"""Overhead: measures the time that pipesched adds to each action, in one process with stages that compute nothing.

    python benchmarks/overhead.py [--microbatches 64] [--pairs 25] [--schedules 1f1b zb-v ...]

A stage is one nn.Identity on a tensor of 4 numbers that needs a gradient. "step" is a whole step of the executor. "by
hand" makes the same calls to the same stages one after the other in one thread. "runtime" is the difference between the
two. "loop alone" runs the interpreter over stages whose methods return immediately. All figures are per compute action.
With more ranks than cores, threads also wait for each other.
"""

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from measure import machine
from torch import nn

import pipesched
from pipesched.program.actions import Kind, Lane
from pipesched.program.lowering import lower
from pipesched.program.program import Program
from pipesched.runtime.executors.threads import RunSpec, ThreadExecutor
from pipesched.runtime.stage.stage import Stage
from pipesched.runtime.stage.step_data import StepData
from pipesched.tensors.payload import Payload, PerConsumer

NAMES = ["1f1b", "gpipe", "interleaved-1f1b", "interleaved-zb", "zb-h1", "zb-v"]


class Nothing:
    """A stage whose methods return immediately."""

    def __init__(self, index: int) -> None:
        self.grads = PerConsumer([None] * min(index, 1))

    def forward(self, microbatch: int, *arrived: Any, split: bool, checkpointed: bool) -> None:
        pass

    def recompute(self, microbatch: int, *, split: bool) -> None:
        pass

    def backward(self, microbatch: int, *grads: Any) -> PerConsumer:
        return self.grads

    input_grad = backward

    def weight_grad(self, microbatch: int) -> None:
        pass


def real_stages(num_stages: int) -> dict[int, Stage]:
    """Return stages that each run one nn.Identity."""
    return {index: Stage({"empty": nn.Identity()}, torch.device("cpu")) for index in range(num_stages)}


class Case:
    """A program with its empty stages, and the three ways to run them."""

    def __init__(self, schedule: str, num_ranks: int, num_microbatches: int) -> None:
        self.program: Program = lower(pipesched.schedules.get(schedule).program(num_ranks, num_microbatches))
        self.computes = sum(action.lane is Lane.COMPUTE for action in self.program.columns)
        self.executor = ThreadExecutor([torch.device("cpu")] * num_ranks, 1)
        self.stages = real_stages(self.program.num_stages)
        self.num_microbatches = num_microbatches

    def begin(self, *_: Any) -> None:
        x = torch.zeros(4, requires_grad=True)
        inputs = [((x,), {}) for _ in range(self.num_microbatches)]
        grads = [(torch.ones(4),)] * self.num_microbatches
        step_data = StepData(0, 0, inputs, output_grads=grads)
        for stage in self.stages.values():
            stage.begin(step_data)

    def whole_step(self) -> float:
        """Run a step in the executor and return its seconds. There is no loss: gradients of the outputs are given."""
        start = time.perf_counter()
        self.executor.run(RunSpec(self.program, self.stages, prepare=self.begin), grad=True)
        return time.perf_counter() - start

    def by_hand(self) -> float:
        """Make the same calls to the stages in one thread, and return the seconds."""
        self.begin()
        start = time.perf_counter()
        chain = [self.stages[index] for index in range(self.program.num_stages)]
        splits = any(action.kind is Kind.I for action in self.program.columns)
        for microbatch in range(self.num_microbatches):
            value: tuple[Payload, ...] = ()
            for stage in chain:
                value = (stage.forward(microbatch, *value, split=splits),)
            grads: Sequence[Any] = ()
            for stage in reversed(chain):
                grads = stage.input_grad(microbatch, *grads) if splits else stage.backward(microbatch, *grads)
                if splits:
                    stage.weight_grad(microbatch)
        return time.perf_counter() - start

    def loop_alone(self) -> float:
        """Run the interpreter over stages whose methods return immediately, and return the seconds."""
        nothing = {index: Nothing(index) for index in range(self.program.num_stages)}
        start = time.perf_counter()
        self.executor.run(RunSpec(self.program, nothing), grad=True)
        return time.perf_counter() - start


def main() -> None:
    """Print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--schedules", nargs="+", default=NAMES, choices=pipesched.schedules.names())
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    print("microseconds per compute action")
    print(f"{'schedule':20}{'ranks':>6}{'step':>10}{'by hand':>10}{'runtime':>10}{'loop alone':>12}")
    for schedule in arguments.schedules:
        for num_ranks in (1, 2):
            case = Case(schedule, num_ranks, arguments.microbatches)
            rows: list[tuple[float, float, float]] = []
            for _ in range(arguments.pairs + 2):
                rows.append((case.whole_step(), case.by_hand(), case.loop_alone()))
            step, hand, loop = (median(column) / case.computes * 1e6 for column in zip(*rows[2:], strict=True))
            print(f"{schedule:20}{num_ranks:6}{step:10.1f}{hand:10.1f}{step - hand:10.1f}{loop:12.1f}", flush=True)
            case.executor.close()


if __name__ == "__main__":
    main()
