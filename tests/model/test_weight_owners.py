"""Every parameter and every layer is in exactly one stage, even if no call uses it; tied weights excepted."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pipesched import Pipeline
from pipesched.errors import GraphError, PartitionError
from pipesched.model.weight_owners import Owners
from tests.support.places import Group, Run, has_last_rank, place
from tests.support.rank_processes import Ranks


class Spare(nn.Module):
    """Blocks, with unused parameters before, among and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(3))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.blocks[2].extra = nn.Linear(2, 2)
        self.pooler = nn.Linear(4, 4)
        self.register_buffer("never", torch.zeros(2))
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(block(x)) + self.table
        return x


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


def spare(group: Group, **options) -> Pipeline:
    torch.manual_seed(0)
    choices = {"boundaries": ["blocks.2", "blocks.4"], "num_microbatches": 3, **options}
    return Pipeline(Spare(), X[:2], loss_fn=loss_fn, **place(group), **choices)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1)


def owned(group: Group) -> tuple[list[str], list[str], list[int]]:
    """The names in this process, the names of its optimizers' parameters, and the numbers of these parameters."""
    with spare(group, optimizer=adam) as pipe:
        pipe.step(X, target=X)
        held = [
            p for optimizer in pipe.optimizers.values() for group_ in optimizer.param_groups for p in group_["params"]
        ]
        optimized = [name for name, p in pipe.named_parameters() if any(p is other for other in held)]
        assert len(pipe.full_state_dict()) == len(Spare().state_dict())
        pipe.load_state_dict(pipe.state_dict())
        return list(pipe.state_dict()), optimized, [len(held)]


def test_each_is_in_one_ranks_state_and_in_one_optimizer(run: Run) -> None:
    results = run(3, owned)
    state = Counter(name for names, _, _ in results for name in names)
    optimized = Counter(name for _, names, _ in results for name in names)
    model = Spare()
    assert state == Counter([*model.state_dict()])
    assert optimized == Counter(name for name, _ in model.named_parameters())
    assert sum(count for _, _, counts in results for count in counts) == len(optimized)


def names_here(group: Group) -> list[str]:
    with spare(group) as pipe:
        return list(pipe.state_dict())


def test_what_no_call_uses_lies_with_what_is_registered_before_it(ranks: Ranks) -> None:
    first, second, third = ranks.run(3, names_here)
    assert "token" in first
    assert {"blocks.2.extra.weight", "blocks.2.extra.bias"} < {*second}
    assert {"pooler.weight", "pooler.bias"} < {*third}
    assert {"never", "table"} < {*first}  # registered with the model itself; code between layers uses the table


def test_the_stages_show_what_no_call_uses() -> None:
    with Pipeline(Spare(), X[:2], loss_fn=loss_fn, devices=["cpu"] * 2, boundaries=[3]) as pipe:
        lines = str(pipe).splitlines()
        assert lines[1].endswith("blocks.2, (between layers), (never used)")


def test_a_tensor_in_no_stage_or_in_two_is_named() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    one, two, three = ({str(at): layer} for at, layer in enumerate(model))
    Owners(model, [(0, one), (1, {**two, **three})], loss=1)
    with pytest.raises(
        GraphError,
        match=r"that is not tied must be in exactly one stage; '2.weight' is in none of the 2 stages; register",
    ):
        Owners(model, [(0, one), (1, two)], loss=1)
    with pytest.raises(GraphError, match=r"'1.weight' is in stages 0 and 1; register"):
        Owners(model, [(0, {**one, **two}), (1, {**two, **three})], loss=1)
    tied = list(model[1].parameters())
    Owners(model, [(0, {**one, **two}), (1, {**two, **three})], loss=1, tied=tied)


def test_a_plan_with_a_layer_in_no_stage_or_in_two_stages_is_refused() -> None:
    with Pipeline(Spare(), X[:2], loss_fn=loss_fn, devices=["cpu"] * 2, boundaries=[3]) as pipe:
        plan = pipe.plan
    first, second = plan.stages
    for stages, match in (
        ((first[:-1], second), "layer 'blocks.2' is in no stage of the plan"),
        ((first, first[1:] + second), "layer 'blocks.1' is in several stages of the plan"),
    ):
        with pytest.raises(PartitionError, match=match):
            Pipeline(Spare(), X[:2], loss_fn=loss_fn, devices=["cpu"] * 2, plan=replace(plan, stages=stages))


def load_another_ranks(group: Group) -> str:
    with spare(group) as pipe:
        state = pipe.state_dict()
        missing = "pooler.weight" if has_last_rank(group) else "blocks.0.weight"
        state.pop(missing, None)
        if missing not in dict(pipe.named_parameters()):
            return ""
        with pytest.raises(RuntimeError, match=f"Missing key.*{missing}"):
            pipe.load_state_dict(state)
        return missing


def test_a_state_without_what_a_rank_owns_is_refused_by_name(ranks: Ranks) -> None:
    assert ranks.run(3, load_another_ranks) == ["blocks.0.weight", "", "pooler.weight"]
