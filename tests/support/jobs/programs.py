"""Jobs of test_distributed that run whole programs with fake stages."""

import threading
from typing import Any

import torch

from pipesched import Costs, Kind, Program, schedules
from pipesched.program.lowering import lower
from pipesched.runtime.connected_rank import ConnectedRank
from pipesched.runtime.executors.processes import ProcessExecutor
from pipesched.runtime.executors.threads import RunSpec
from pipesched.runtime.process_collectives import ProcessCollectives
from pipesched.runtime.rank_grid import RankGrid
from pipesched.tensors.payload import Payload, PerConsumer
from pipesched.testing.fake_executor import FakeStage


def run_spec(program: Program, stages: dict[int, Any], **others: Any) -> RunSpec:
    return RunSpec(program, stages, **others)


class Checks(FakeStage):
    """A fake stage that sends tensors, so that they pass through the real transport. Shapes differ between stages."""

    def forward(self, microbatch: int, *arrived: Any, split: bool, checkpointed: bool) -> Any:
        given = [Told(Kind.F, int(one.leaves[0][0]), int(one.leaves[0][1])) for one in arrived]
        super().forward(microbatch, *given, split=split, checkpointed=checkpointed)
        return Payload.of(torch.tensor([self.index, microbatch] + [0] * self.index))

    def backward(self, microbatch: int, *grads: Any) -> Any:
        super().backward(microbatch, *map(told, grads))
        return PerConsumer([(torch.tensor([self.index, microbatch]), None)] * self._num_producers)

    def input_grad(self, microbatch: int, *grads: Any) -> Any:
        super().input_grad(microbatch, *map(told, grads))
        return PerConsumer([(torch.tensor([self.index, microbatch]), None)] * self._num_producers)

    def _check(self, values: Any, kind: Kind, microbatch: int) -> None:
        super()._check(values, kind, microbatch)
        self.givers = [one.stage for one in values]


class Told:
    """The attributes of an Action that a FakeStage checks, read from a received tensor."""

    def __init__(self, kind: Kind, stage: int, microbatch: int) -> None:
        self.kind, self.stage, self.microbatch = kind, stage, microbatch


def told(grads: Any) -> Told:
    return Told(Kind.B, int(grads[0][0]), int(grads[0][1]))


def checked_run(executor: ProcessExecutor, program: Program) -> Any:
    free = Costs.uniform(program.num_stages, forward_s=0, input_grad_s=0, weight_grad_s=0)
    stages = {index: Checks(index, free) for index in range(program.num_stages)}
    timeline = executor.run(run_spec(program, stages), grad=False, looks=[0] * program.num_microbatches)
    order = program.orders[executor.connected.rank]
    assert [span.action for span in timeline.spans()] == list(order)
    for index in program.chunks(executor.connected.rank):
        assert not list(stages[index].missing(program))
    return timeline


def run_programs(group: Any, texts: list[str]) -> int:
    """Run each program. Return the number of values that this rank has received."""
    executor = ProcessExecutor(ConnectedRank(group, RankGrid.single(group, timeout_s=10)))
    spans = [span for text in texts for span in checked_run(executor, lower(Program.parse(text))).spans()]
    executor.close()
    return sum(span.action.kind in (Kind.RECV_F, Kind.RECV_B) for span in spans)


def one_clock(group: Any, name: str) -> list[Any]:
    """Return the spans of all ranks, as rank 0 collects them."""
    executor = ProcessExecutor(ConnectedRank(group, RankGrid.single(group, timeout_s=10)))
    program = lower(schedules.get(name).program(group.size(), 4))
    costs = Costs.uniform(program.num_stages, forward_s=0.002, input_grad_s=0.002, weight_grad_s=0.002)
    stages = {index: FakeStage(index, costs) for index in range(program.num_stages)}
    timeline = executor.run(run_spec(program, stages), grad=False)
    spans = ProcessCollectives(executor.connected).gather_spans([timeline])
    executor.close()
    return spans if group.rank() == 0 else []


def several_at_once(group: Any) -> int:
    """Use several open executors of one group in turn. Return the number of threads that outlive the executors."""
    executors = [ProcessExecutor(ConnectedRank(group, RankGrid.single(group, timeout_s=10))) for _ in range(3)]
    program = lower(schedules.get("interleaved-1f1b").program(group.size(), 4))
    for _ in range(2):
        for executor in executors:
            checked_run(executor, program)
    executors[0].close()
    executors[0].close()
    checked_run(executors[1], program)
    ProcessCollectives(executors[1].connected).gathered(
        None
    )  # waits until all ranks are done, so that no rank deletes an executor that others need
    sleepers = [thread for thread in threading.enumerate() if "alarm" in thread.name]
    del executor, executors
    for sleeper in sleepers:
        sleeper.join(5)
    return sum(sleeper.is_alive() for sleeper in sleepers)


def settings(group: Any) -> dict[str, Any]:
    """Return torch's settings in a stage's forward (threads, gradients, inference mode), and its threads afterwards."""
    seen: dict[str, Any] = {}

    class Looks(FakeStage):
        def forward(self, *args: Any, **named: Any) -> Any:
            seen.update(
                threads=torch.get_num_threads(),
                grad=torch.is_grad_enabled(),
                inference=torch.is_inference_mode_enabled(),
            )
            super().forward(*args, **named)
            return Payload.of(torch.ones(3).t())

        def _check(self, *_: Any) -> None:
            pass

    executor = ProcessExecutor(ConnectedRank(group, RankGrid.single(group, timeout_s=10)), intra_op_threads=2)
    program = lower(schedules.get("gpipe").program(group.size(), 3).forward())
    free = Costs.uniform(program.num_stages, forward_s=0)
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            executor.run(run_spec(program, {i: Looks(i, free) for i in range(program.num_stages)}), grad=False)
    executor.close()
    return {**seen, "after": torch.get_num_threads()}


def exchange(group: Any) -> tuple[list[Any], Any]:
    executor = ProcessExecutor(ConnectedRank(group, RankGrid.single(group, timeout_s=10)))
    ranks = ProcessCollectives(executor.connected)
    values = ranks.gathered({"rank": group.rank(), "big": torch.full((group.rank() * 1000,), 1.0)})
    read = [ranks._share(1, torch.tensor(float(number)) if group.rank() == 1 else None) for number in range(3)]
    shared = [float(one()) for one in reversed(read)]
    executor.close()
    return [(one["rank"], float(one["big"].sum())) for one in values], shared
