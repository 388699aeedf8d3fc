"""State copies: a copy that runs the updates of its owner again has the bits of the owner."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import ExponentialLR

from pipesched.elastic.state_copy import RankState, RankUpdate, StateCopy, bare, rank_state, settings_of_groups
from tests.support.copied_states import Counted, Halving, Owner, SelfTuned, assert_same_parts, grouped

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda params: SGD(params, lr=0.1),
    "momentum": lambda params: SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda params: Adam(params, lr=0.01),
    "amsgrad": lambda params: Adam(params, lr=0.01, amsgrad=True, weight_decay=0.1),
    "a learning rate in a tensor": lambda params: Adam(params, lr=torch.tensor(0.01), foreach=False),
    "adamw with groups": grouped,
    "adamw with names": lambda params: AdamW(params.named(), lr=0.01),
    "rmsprop": lambda params: RMSprop(params, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda params: Adagrad(params, lr=0.1, lr_decay=0.1),
    "nadam": lambda params: NAdam(params, lr=0.01),
    "plain numbers in its state": lambda params: Counted(params, lr=0.1),
    "writes to gradients": lambda params: Halving(params, lr=0.1),
    "counts in its groups": lambda params: SelfTuned(params, lr=0.1),
    "trainable parameters only": lambda params: SGD([p for p in params if p.requires_grad], lr=0.1, momentum=0.9),
}
STEPS = 4


def copied(owner: Owner, version: int = 0) -> StateCopy:
    copy = StateCopy(lambda _, params: owner.make(params))
    copy.load(owner.state(), version)
    return copy


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_copy_that_runs_the_updates_again_has_the_bits_of_its_owner(name: str) -> None:
    owner = Owner(OPTIMIZERS[name])
    copy = copied(owner)
    assert_same_parts(copy.parts(owner.run), owner.parts())
    for step in range(STEPS):
        copy.replay(owner.step(), step + 1)
        assert copy.version == step + 1
        assert_same_parts(copy.parts(owner.run), owner.parts())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_copy_of_a_later_version_has_the_states_of_its_owner(name: str) -> None:
    owner = Owner(OPTIMIZERS[name])
    early = copied(owner)
    for _ in range(STEPS):
        owner.step()
    early.load(owner.state(), STEPS)
    for copy in (early, copied(owner, STEPS)):
        assert_same_parts(copy.parts(owner.run), owner.parts())
    late = owner.step()
    for copy in (early, copied(owner, STEPS + 1)):
        if copy is early:
            copy.replay(late, STEPS + 1)
        assert_same_parts(copy.parts(owner.run), owner.parts())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bare_copy_of_an_optimizer_takes_its_state_without_the_function_of_the_user(name: str) -> None:
    owner = Owner(OPTIMIZERS[name])
    owner.step()
    copy = StateCopy(lambda stage, _: bare(owner.optimizers[stage].wrapped))
    copy.load(owner.state(), 1)
    before = owner.parts()
    assert_same_parts(copy.parts(owner.run), before)
    owner.step()
    assert_same_parts(copy.parts(owner.run), before)  # it shares nothing with the owner


def test_the_copy_shares_no_memory_with_its_owner() -> None:
    owner = Owner(OPTIMIZERS["amsgrad"])
    owner.step()
    copy = copied(owner, 1)
    before = owner.parts()
    with torch.no_grad():
        for tensor in (*owner.model.parameters(), *owner.model.buffers()):
            tensor.fill_(7)
        for stage in owner.optimizers.values():
            for state in stage.wrapped.state.values():
                for value in state.values():
                    value.fill_(7)
    assert_same_parts(copy.parts(owner.run), before)


# ---- what a step leaves out -----------------------------------------------------------------------------------------


def test_parameters_without_a_gradient_keep_their_values() -> None:
    owner = Owner(OPTIMIZERS["momentum"])
    copy = copied(owner)
    for step in range(STEPS):
        copy.replay(owner.step(unused=["4.weight"] if step % 2 else []), step + 1)
        assert_same_parts(copy.parts(owner.run), owner.parts())


def test_a_skipped_update_changes_the_buffers_only() -> None:
    owner = Owner(OPTIMIZERS["adam"])
    copy = copied(owner)
    copy.replay(owner.step(), 1)
    copy.replay(owner.step(skipped=[0, 1]), 2)
    assert_same_parts(copy.parts(owner.run), owner.parts())
    copy.replay(owner.step(skipped=[1]), 3)
    assert_same_parts(copy.parts(owner.run), owner.parts())


def test_a_parameter_that_is_frozen_later_is_frozen_in_a_copy_that_is_loaded_again() -> None:
    owner = Owner(OPTIMIZERS["adam"])
    copy = copied(owner)
    copy.replay(owner.step(), 1)
    owner.model[4].requires_grad_(False)
    owner.model[3].requires_grad_(True)
    copy.load(owner.state(), 1)
    assert {name: own.requires_grad for name, own in copy.parameters.items()} == {
        name: own.requires_grad for name, own in owner.model.named_parameters()
    }
    copy.replay(owner.step(), 2)
    assert_same_parts(copy.parts(owner.run), owner.parts())


def test_a_rank_without_optimizers_has_a_copy() -> None:
    owner = Owner(lambda _: None)
    copy = copied(owner)
    assert owner.state().optimizers == {}
    copy.replay(owner.step(), 1)
    assert_same_parts(copy.parts(owner.run), owner.parts())


# ---- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("how", ["scheduler", "by hand"])
def test_settings_that_change_between_steps_arrive_in_the_next_update(name: str, how: str) -> None:
    owner = Owner(OPTIMIZERS[name])
    schedulers = [ExponentialLR(stage.wrapped, 0.5) for stage in owner.optimizers.values()] * (how == "scheduler")
    copy = copied(owner)
    for step in range(STEPS):
        if step:
            before = owner.parts()
            for scheduler in schedulers:
                scheduler.step()
            if how == "by hand":
                for stage in owner.optimizers.values():
                    for number, group in enumerate(stage.wrapped.param_groups):
                        group["lr"] = group["lr"] * (0.5 + number)
            copy.next_settings = settings_of_groups(owner.state())
            assert_same_parts(copy.parts(owner.run), before)  # the changes belong to the step that follows
        copy.replay(owner.step(), step + 1)
        assert copy.next_settings is None
        assert_same_parts(copy.parts(owner.run), owner.parts())


def test_an_update_without_new_settings_uses_those_of_the_last_one() -> None:
    owner = Owner(OPTIMIZERS["momentum"])
    copy = copied(owner)
    for stage in owner.optimizers.values():
        stage.wrapped.param_groups[0]["lr"] = 0.03
    copy.next_settings = settings_of_groups(owner.state())
    for version in (1, 2):
        copy.replay(owner.step(), version)
        assert {group["lr"] for groups in copy.settings.values() for group in groups} == {0.03}
        assert_same_parts(copy.parts(owner.run), owner.parts())


def test_a_load_drops_settings_that_were_known_for_the_next_step() -> None:
    owner = Owner(OPTIMIZERS["sgd"])
    copy = copied(owner)
    copy.next_settings = {0: [{"lr": 9.0}], 1: [{"lr": 9.0}]}
    copy.load(owner.state(), 0)
    assert copy.next_settings is None
    assert copy.settings == settings_of_groups(owner.state())


def test_settings_that_an_optimizer_changes_by_itself_are_those_of_its_owner() -> None:
    owner = Owner(OPTIMIZERS["counts in its groups"])
    copy = copied(owner)
    for version in (1, 2):
        copy.replay(owner.step(), version)
        assert copy.settings == settings_of_groups(owner.state())
        assert [group["count"] for groups in copy.settings.values() for group in groups] == [version] * 2


def test_a_group_that_is_added_between_steps_is_copied() -> None:
    owner = Owner(OPTIMIZERS["trainable parameters only"])
    copy = copied(owner)
    copy.replay(owner.step(), 1)
    owner.model[3].requires_grad_(True)
    owner.optimizers[1].wrapped.add_param_group({"params": [owner.model[3].weight], "lr": 0.5})
    copy.load(owner.state(), 1)
    assert_same_parts(copy.parts(owner.run), owner.parts())
    copy.replay(owner.step(), 2)
    assert_same_parts(copy.parts(owner.run), owner.parts())


# ---- memory and versions --------------------------------------------------------------------------------------------


def pointers(copy: StateCopy) -> dict[str, int]:
    """Return the address of each tensor of a copy."""
    found = {f"parameter {name}": own.data_ptr() for name, own in copy.parameters.items()}
    found |= {f"buffer {name}": own.data_ptr() for name, own in copy.buffers.items()}
    names = {id(own): name for name, own in copy.parameters.items()}
    for optimizer in copy._optimizers.values():
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    found[f"{key} of {names[id(parameter)]}"] = value.data_ptr()
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_memory_of_a_copy_is_used_again(name: str) -> None:
    owner = Owner(OPTIMIZERS[name])
    owner.step()
    copy = copied(owner, 1)
    before = pointers(copy)
    owner.step()
    copy.load(owner.state(), 2)
    assert pointers(copy) == before
    copy.replay(owner.step(), 3)
    assert pointers(copy) == before


def test_a_state_of_another_form_gets_other_memory() -> None:
    owner, other = Owner(OPTIMIZERS["adam"]), Owner(OPTIMIZERS["adam"], width=6)
    owner.step()
    other.step()
    copy = copied(owner, 1)
    copy.load(other.state(), 1)
    assert_same_parts(copy.parts(other.run), other.parts())
    copy.replay(other.step(), 2)
    assert_same_parts(copy.parts(other.run), other.parts())


def test_a_copy_has_no_version_before_its_first_load_and_after_a_failed_change() -> None:
    """The copy may then hold a part of the new state only."""
    owner = Owner(OPTIMIZERS["sgd"])
    copy = StateCopy(lambda _, params: owner.make(params))
    assert copy.version is None
    copy.load(owner.state(), 0)
    wrong = RankUpdate({}, [5], {}, torch.zeros(0))
    with pytest.raises(KeyError):
        copy.replay(wrong, 1)
    assert copy.version is None
    copy.load(owner.state(), 0)
    state = owner.state()
    with pytest.raises(KeyError):
        copy.load(RankState(state.parameters, {}, state.buffers, state.optimizers), 1)
    assert copy.version is None


def test_the_state_of_a_rank_names_its_parameters_groups_and_states() -> None:
    owner = Owner(grouped)
    owner.step()
    state = rank_state(owner.run, owner.optimizers, dict(owner.model.named_buffers()))
    assert list(state.parameters) == [name for name, _ in owner.model.named_parameters()]
    assert [name for name, trains in state.trains.items() if not trains] == ["3.weight", "3.bias"]
    assert state.optimizers[1].names == ["3.weight", "3.bias", "4.weight", "4.bias"]
    assert [group.names for group in state.optimizers[1].groups] == [["3.weight", "4.weight"], ["3.bias", "4.bias"]]
    assert set(state.optimizers[1].states) == {"4.weight", "4.bias"}
    assert all(isinstance(own, torch.Tensor) and not own.requires_grad for own in state.parameters.values())
