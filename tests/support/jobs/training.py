"""Jobs of test_distributed that train stages with real layers, without a Pipeline."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Program, schedules
from pipesched.capture.stage_body import Head
from pipesched.program.lowering import add_recompute, halves, lower
from pipesched.runtime.connected_rank import ConnectedRank
from pipesched.runtime.executors.channel_plan import look
from pipesched.runtime.executors.processes import ProcessExecutor
from pipesched.runtime.executors.threads import RunSpec
from pipesched.runtime.microbatches import Splitter
from pipesched.runtime.process_collectives import ProcessCollectives
from pipesched.runtime.rank_grid import RankGrid
from pipesched.runtime.stage import split_backward as backward
from pipesched.runtime.stage.stage import Stage
from pipesched.runtime.stage.step_data import StepData
from pipesched.testing import reference_step
from tests.support.models import gradients, mixed_model


class Trainer:
    """Cuts a model into the stages of a program, and trains this rank's stages with an executor."""

    def __init__(self, group: Any, model: nn.Sequential, program: Program, executor: ProcessExecutor) -> None:
        self.group, self.program, self.executor, self.model = group, program, executor, model
        self.ranks = ProcessCollectives(executor.connected)
        layers = dict(model.named_children())
        names = list(layers)
        cuts = [len(names) * stage // program.num_stages for stage in range(program.num_stages + 1)]
        last = program.num_stages - 1
        self.stages = {
            index: Stage(
                {name: layers[name] for name in names[cuts[index] : cuts[index + 1]]},
                torch.device("cpu"),
                Head(functional.cross_entropy) if index == last else None,
            )
            for index in program.chunks(group.rank())
        }
        self.own = {name for stage in self.stages.values() for name in stage.layers}
        self.last_rank = program.placement[last]
        self.steps = 0

    def step(self, x: Tensor, y: Tensor, orders: list[Any] = [None]) -> Tensor:
        batch = Splitter(self.program.num_microbatches, False, 0, None, "mean").batch((x,), {}, y)
        factors = Splitter(self.program.num_microbatches, False, 0, None, "mean").factors(batch)
        step_data = StepData(3, self.steps, list(batch.inputs), targets=batch.targets, factors=factors)
        self.steps += 1

        def begin(caller: Any) -> None:
            step_data.autocast = caller.autocast
            for stage in self.stages.values():
                stage.begin(step_data)

        looks: list[Hashable] = [look(one) for one in batch.inputs]
        for number, part in enumerate(orders):
            prepare = begin if number == 0 else lambda caller: None
            self.executor.run(RunSpec(self.program, self.stages, prepare=prepare, orders=part), grad=True, looks=looks)
        total = None
        if self.group.rank() == self.last_rank:
            for microbatch in range(len(batch.rows)):
                loss = step_data.losses[microbatch]
                total = loss if total is None else total + loss
        return self.ranks._share(self.last_rank, total)()


def train(group: Any, names: list[str], checkpoint: str) -> None:
    """Check that two steps of each schedule are bit-identical to a plain loop. The second batch has another size."""
    executor = ProcessExecutor(ConnectedRank(group, RankGrid.single(group, timeout_s=10)))
    backward.PAYS_FLOPS = 0  # defer the weight gradients of all products to W, however small
    for name in names:
        expected, actual = mixed_model(), mixed_model()
        program = lower(add_recompute(schedules.get(name).program(group.size(), 4), checkpoint))
        trainer = Trainer(group, actual, program, executor)
        train_both(trainer, expected)
        if name == "gpipe":
            trainer.steps = 0
            trainer.model.zero_grad()
            expected = mixed_model()
            actual.load_state_dict(expected.state_dict())
            train_both(trainer, expected, list(halves(program)))
    executor.close()


def train_both(trainer: Trainer, expected: nn.Sequential, orders: Any = (None,)) -> None:
    for step, rows in enumerate((19, 8)):
        torch.manual_seed(rows)
        x, y = torch.randn(rows, 8), torch.randint(0, 4, (rows,))
        loss = trainer.step(x, y, list(orders))
        wanted = reference_step(
            expected, x, target=y, loss_fn=functional.cross_entropy, num_microbatches=4, seed=3, step=step
        )
        assert torch.equal(loss, wanted), (trainer.program.name, step)
        ours, theirs = gradients(trainer.model), gradients(expected)
        assert {name.split(".")[0] for name in ours} <= trainer.own
        for name in theirs:
            if name.split(".")[0] in trainer.own:
                assert torch.equal(ours[name], theirs[name]), (trainer.program.name, step, name)
        buffers = dict(trainer.model.named_buffers())
        for name, buffer in expected.named_buffers():
            if name.split(".")[0] in trainer.own:
                assert torch.equal(buffers[name], buffer)
