"""Jobs of test_distributed: ranks that raise an error, are late, die, or run a different program."""

import os
import threading
import time
from typing import Any

import torch

from pipesched import Action, Costs, Kind, schedules
from pipesched.errors import ExecutionError
from pipesched.program.lowering import lower
from pipesched.runtime.connected_rank import ConnectedRank
from pipesched.runtime.executors.channel_plan import look
from pipesched.runtime.executors.processes import ProcessExecutor
from pipesched.runtime.rank_grid import RankGrid
from pipesched.testing.fake_executor import FakeStage
from tests.support.jobs.programs import Checks, checked_run, run_spec


class Raises(FakeStage):
    """A fake stage that calls ``how`` in the action ``failing``, and sleeps in the action ``slow``."""

    failing: Action | None = None
    how: Any = None
    slow: Action | None = None

    def _run(self, kind: Kind, microbatch: int, after: Any) -> None:
        if self.failing == Action(self.index, kind, microbatch):
            self.how()
        if self.slow == Action(self.index, kind, microbatch):
            be_late()
        super()._run(kind, microbatch, after)


def divide() -> None:
    raise ZeroDivisionError("a layer's own error")


def end_process() -> None:
    os._exit(1)


def be_late() -> None:
    time.sleep(2)


def fail(
    group: Any, failing: Action, how: Any, timeout_s: float = 10, slow: Action | None = None
) -> tuple[float, str, str, list[str], str]:
    """Run a good step, a failing step and another good step.

    Returns the seconds of the failing step, its error's type, text and notes, and the error of the last step.
    """
    executor = ProcessExecutor(ConnectedRank(group, RankGrid.single(group, timeout_s=timeout_s)))
    program = lower(schedules.get("1f1b").program(group.size(), 8))
    costs = Costs.uniform(program.num_stages, forward_s=0, input_grad_s=0, weight_grad_s=0)

    def step(stage: Any, executor: ProcessExecutor) -> None:
        executor.run(run_spec(program, {index: stage(index, costs) for index in range(program.num_stages)}), grad=False)

    step(FakeStage, executor)
    start_s = time.perf_counter()
    caught: BaseException = AssertionError("nothing was raised")
    try:
        step(type("Failing", (Raises,), {"failing": failing, "how": staticmethod(how), "slow": slow}), executor)
    except BaseException as error:
        caught = error
    seconds = time.perf_counter() - start_s
    try:
        step(FakeStage, executor)
        after = "it ran"
    except ExecutionError as error:
        after = str(error)
    executor.close()
    del executor
    assert not [thread for thread in threading.enumerate() if "alarm" in thread.name]
    return seconds, type(caught).__name__, str(caught), getattr(caught, "__notes__", []), after


def good_step(group: Any) -> None:
    """Run one step, and close the pipeline."""
    executor = ProcessExecutor(ConnectedRank(group, RankGrid.single(group, timeout_s=10)))
    checked_run(executor, lower(schedules.get("1f1b").program(group.size(), 8)))
    executor.close()


def different_programs(group: Any, odd: int) -> tuple[str, int]:
    """Run a step in which rank ``odd`` has a different program, and then a step with equal programs.

    Returns the error of the first step, and the number of micro-batches that this rank had started.
    """
    executor = ProcessExecutor(ConnectedRank(group, RankGrid.single(group, timeout_s=10)))
    name = "gpipe" if group.rank() == odd else "1f1b"
    program = lower(schedules.get(name).program(group.size(), 6))
    free = Costs.uniform(program.num_stages, forward_s=0, input_grad_s=0, weight_grad_s=0)
    stages = {index: FakeStage(index, free) for index in range(program.num_stages)}
    try:
        executor.run(run_spec(program, stages), grad=False)
        text = "it ran"
    except ExecutionError as error:
        text = str(error)
    ran = sum(len(stage._state) for stage in stages.values())
    checked_run(executor, lower(schedules.get("1f1b").program(group.size(), 6)))
    executor.close()
    return text, ran


def different_batches(group: Any) -> str:
    """Return the error of a step in which each rank has a batch of a different form, so that message sizes differ."""
    executor = ProcessExecutor(ConnectedRank(group, RankGrid.single(group, timeout_s=10)))
    program = lower(schedules.get("1f1b").program(group.size(), 4))
    checked_run(executor, program)
    free = Costs.uniform(program.num_stages, forward_s=0, input_grad_s=0, weight_grad_s=0)
    stages = {index: Checks(index, free) for index in range(program.num_stages)}
    try:
        executor.run(run_spec(program, stages), grad=False, looks=[look(torch.zeros(group.rank() + 1, 3))] * 4)
    except ExecutionError as error:
        return str(error)
    return "it ran"
