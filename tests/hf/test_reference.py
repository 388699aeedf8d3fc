"""A PipelineTrainer's steps have the bits of a loop without a pipeline, also with dropout."""

import torch

from pipesched import Microbatch
from pipesched.testing import reference_step
from tests.hf import jobs


class Noted(jobs.PipelineTrainer):
    """Notes the batches that it trains on, and the number of labels of their steps."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.noted = [*getattr(self, "noted", []), (dict(inputs), num_items_in_batch)]
        return super().training_step(model, inputs, num_items_in_batch)


def test_with_dropout_the_losses_and_weights_are_those_of_a_loop_with_reference_step(monkeypatch):
    """Two batches of four rows a step, each in two micro-batches."""
    monkeypatch.setattr(jobs, "PipelineTrainer", Noted)
    torch.manual_seed(0)
    model, copy = jobs.gpt2(dropout=0.1), jobs.gpt2(dropout=0.1)
    copy.load_state_dict(model.state_dict())
    options = {"max_grad_norm": 0.0, "lr_scheduler_type": "constant", "optim": "sgd"}
    trainer = jobs.trained(jobs.gpt2, jobs.TWO, model=model, **options)
    optimizer = torch.optim.SGD(copy.parameters(), lr=1e-3)
    losses = []
    for step, batches in enumerate(zip(trainer.noted[::2], trainer.noted[1::2], strict=True)):
        halves = [
            Microbatch(
                **{name: value[part] for name, value in batch.items()}, num_items_in_batch=count, target={"share": 1.0}
            )
            for batch, count in batches
            for part in (slice(0, 2), slice(2, 4))
        ]
        loss = reference_step(
            copy,
            microbatches=halves,
            loss_fn=lambda outputs, target: outputs["loss"] * target["share"],
            loss_reduction="sum",
            step=step,
            seed=3,
        )
        losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    printed = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert printed == losses
    assert all(map(torch.equal, model.state_dict().values(), copy.state_dict().values()))
