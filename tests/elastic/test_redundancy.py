"""Redundancy: wherever the ranks stop, those that live have a common version, with the bits of an undisturbed run.

The ranks are threads. Their messages pass through queues in memory, and a rank stops at a chosen message or call.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD

from pipesched.elastic.redundancy import Redundancy, SettingsChange
from pipesched.elastic.state_transfer import held_in_parts
from pipesched.elastic.survivors import HeldLayers, RankReport, common_version
from pipesched.runtime.transport.ports import ConnectionLostError
from pipesched.saving.saved_run import CheckpointPart
from tests.support.copied_states import Counted, Halving, Owner, SelfTuned, assert_same_parts, grouped
from tests.support.random_programs import quick

pytestmark = pytest.mark.timeout(100)

OPTIMIZERS = {
    "momentum": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "adamw with groups": grouped,
    "plain numbers in its state": lambda params: Counted(params, lr=0.1),
    "writes to gradients": lambda params: Halving(params, lr=0.1),
    "counts in its groups": lambda params: SelfTuned(params, lr=0.1),
}
STEPS = 3
NEVER = 10**6


@dataclass
class World:
    """What connects the ranks. A rank stops at its message or its call of this number, whichever comes first.

    Args:
        rows: the ranks of each replica.
        messages: the number of messages that a rank sends and receives before it stops, keyed by rank.
        calls: the number of calls of its ``Redundancy`` that a rank begins before it stops, keyed by rank.
        late: whether the lanes send nothing before the forwards of the step under way.

    """

    rows: Sequence[Sequence[int]]
    messages: Mapping[int, int] = field(default_factory=dict)
    calls: Mapping[int, int] = field(default_factory=dict)
    late: bool = False
    queues: dict[Any, deque[Any]] = field(default_factory=lambda: defaultdict(deque))
    #: The number of messages and calls of each rank, and how many steps it has begun, run forward, and ended.
    sent: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    called: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    begun: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    forwards: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    ended: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    silent: set[int] = field(default_factory=set)  # ranks that send nothing more
    stopped: set[int] = field(default_factory=set)  # ranks that begin no more step
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait(self, until: Callable[[], bool], lost: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: until() or lost(), 20)
            if not until():
                raise ConnectionLostError("a rank has stopped")

    def end(self, ended: set[int], rank: int) -> None:
        with self.changed:
            ended.add(rank)
            self.changed.notify_all()

    def wait_if_late(self, rank: int) -> None:
        """Let the lane of a rank wait until the rank has run the forwards of its present step."""
        if self.late:
            self.wait(lambda: self.forwards[rank] > self.ended[rank] or rank in self.stopped, lambda: False)

    def count_message(self, rank: int) -> None:
        self.wait_if_late(rank)
        self.sent[rank] += 1
        if self.sent[rank] > self.messages.get(rank, NEVER):
            self.end(self.silent, rank)
        if rank in self.silent:
            raise ConnectionLostError("this rank has stopped")

    def count_call(self, rank: int) -> None:
        self.called[rank] += 1
        if self.called[rank] > self.calls.get(rank, NEVER):
            raise ConnectionLostError("this rank has stopped")

    def count(self, steps: dict[int, int], rank: int) -> None:
        with self.changed:
            steps[rank] += 1
            self.changed.notify_all()

    def meet(self, rank: int) -> None:
        """Wait until all ranks have begun the present step: no rank has gradients before."""
        step = self.begun[rank]
        others = [other for row in self.rows for other in row]
        self.wait(
            lambda: all(self.begun[other] >= step for other in others),
            lambda: any(self.begun[other] < step and other in self.stopped for other in others),
        )


class Wire:
    """The channels of a rank's lane."""

    def __init__(self, world: World, rank: int) -> None:
        self._world = world
        self._rank = rank

    def tell(self, rank: int, tag: int, payload: Any) -> None:
        self._world.count_message(self._rank)
        with self._world.changed:
            self._world.queues[self._rank, rank, tag].append(payload.map_tensors(torch.clone))
            self._world.changed.notify_all()

    def ask(self, rank: int, tag: int) -> Callable[[], Any]:
        def take() -> Any:
            world = self._world
            with world.changed:  # or this thread and the sender may each make a queue, and one of the two is lost
                queue = world.queues[rank, self._rank, tag]
            world.count_message(self._rank)
            try:
                world.wait(lambda: bool(queue), lambda: rank in world.silent)
            except ConnectionLostError:
                world.end(world.silent, self._rank)
                raise
            return queue.popleft()

        return take


class Rank:
    """A rank that trains the layers of its position.

    Args:
        world: the connections.
        rank: its number.
        make: creates an optimizer.
        change: called with the rank's stages before each step, for example to change learning rates.

    """

    def __init__(self, world: World, rank: int, make: Any, change: Callable[[Owner, int], None]) -> None:
        self.world = world
        self.rank = rank
        self.row = next(row for row in world.rows if rank in row)
        position = self.row.index(rank)
        self.owners = [Owner(make, place="x" * place + "/") for place in range(len(self.row))]
        self.owner = self.owners[position]
        self.change = change
        self.returned = 0
        connected = SimpleNamespace(
            grid=SimpleNamespace(rows=world.rows, pipeline=self.row, position=position),
            rank=rank,
            num_ranks=sum(map(len, world.rows)),
            check_peers=lambda: None,
            connect_beside=lambda name, encoding: Wire(world, rank),
            hang_ups_beside=[],
        )
        self.redundancy = Redundancy(connected, make, lambda: 0)

    def run(self, num_steps: int = STEPS) -> None:
        """Train until the end, or until a rank has stopped."""
        try:
            self.use(0)
            for step in range(num_steps):
                self.step(step)
        except ConnectionLostError:
            pass
        self.world.end(self.world.stopped, self.rank)
        self.redundancy.settle()
        self.world.end(self.world.silent, self.rank)

    def use(self, step: int) -> None:
        self.world.count_call(self.rank)
        self.redundancy.wait()
        self.redundancy._lane.start(lambda: self.world.wait_if_late(self.rank))
        stages = {index: SimpleNamespace(optimizer=own) for index, own in self.owner.optimizers.items()}
        self.redundancy.use(stages, {}, self.owner.run, [own.layers for own in self.owners], step)

    def step(self, step: int) -> None:
        self.change(self.owner, step)
        self.world.count_call(self.rank)
        self.redundancy.begin(step)
        self.world.count(self.world.begun, self.rank)
        self.world.meet(self.rank)
        buffers = {name: own.clone() for name, own in self.owner.buffers.items()}
        self.owner.backward()
        self.world.count(self.world.forwards, self.rank)
        try:
            self.world.count_call(self.rank)
            self.owner.update()
            self.world.count_call(self.rank)
        except ConnectionLostError:  # a failed step restores the buffers
            for name, own in self.owner.buffers.items():
                own.copy_(buffers[name])
            raise
        self.world.count(self.world.ended, self.rank)
        self.redundancy.finish()
        self.returned = step + 1

    def report(self) -> RankReport:
        held = self.redundancy.held_layers(live=True)
        return RankReport([HeldLayers(*one) for one in held], self.returned)


def trained(
    rows: Sequence[Sequence[int]],
    make: Any,
    change: Callable[[Owner, int], None] = lambda owner, step: None,
    num_steps: int = STEPS,
    **stops: Any,
) -> list[Rank]:
    """Return ranks that have trained until the end, or until they have stopped."""
    world = World(rows, **stops)
    ranks = [Rank(world, rank, make, change) for row in rows for rank in row]
    threads = [threading.Thread(target=rank.run, args=(num_steps,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in ranks:
        rank.redundancy.end()
    return ranks


def undisturbed(
    make: Any, position: int, change: Callable[[Owner, int], None] = lambda owner, step: None
) -> list[tuple[CheckpointPart, CheckpointPart]]:
    """Return the parts of a checkpoint of each version in a run without copies."""
    owner = Owner(make, place="x" * position + "/")
    parts = [owner.parts()]
    for step in range(STEPS):
        change(owner, step)
        owner.train()
        parts.append(owner.parts())
    return parts


def check_survivors(
    ranks: Sequence[Rank],
    lost: int,
    make: Any,
    change: Callable[[Owner, int], None] = lambda owner, step: None,
) -> int | None:
    """Check that the ranks other than ``lost`` hold the state of a version; return the version.

    Returns None if the ranks stopped before all copies were made, so that no other rank holds the lost layers.
    """
    alive = [rank for rank in ranks if rank.rank != lost]
    layers = [layer for own in ranks[0].owners for layer in own.layers]
    version = common_version({rank.rank: rank.report() for rank in alive}, layers)
    if version is None:
        held = {layer for rank in alive for held in rank.report().held for layer in held.layers}
        assert held != set(layers)
        return None
    assert max(rank.returned for rank in alive) - 1 <= version <= min(rank.returned for rank in alive)
    due = [undisturbed(make, position, change)[version] for position in range(len(ranks[0].row))]
    found = set()
    for rank in alive:
        parts = rank.redundancy.parts(version, rank.owner.run)
        for part, divided in zip(parts[::2], parts[1::2], strict=True):
            place = next(iter(part.tensors)).split("/")[1]
            assert_same_parts([part, divided], due[len(place)])
            found.add(len(place))
    assert found == set(range(len(ranks[0].row)))
    return version


def num_messages(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of messages that each rank sends and receives if no rank stops."""
    ranks = trained(rows, OPTIMIZERS["momentum"])
    return [ranks[0].world.sent[rank.rank] for rank in ranks]


def check_wherever_a_rank_stops(rows) -> None:
    """Check the survivors if a rank stops at any of its messages. All versions must occur."""
    make = OPTIMIZERS["momentum"]
    versions = set()
    for rank, count in enumerate(num_messages(rows)):
        for stop in range(count + 1):
            ranks = trained(rows, make, messages={rank: stop})
            versions.add(check_survivors(ranks, rank, make))
    assert versions >= set(range(STEPS + 1))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rows", [[[0, 1]], [[0, 1, 2]], [[0, 1], [2, 3]]], ids=["2 ranks", "3 ranks", "2 replicas"])
def test_wherever_a_rank_stops_the_others_have_a_common_version(rows) -> None:
    check_wherever_a_rank_stops(rows)


CUTS = st.dictionaries(st.integers(0, 3), st.integers(0, 40), max_size=3)
CALLS = st.dictionaries(st.integers(0, 3), st.integers(1, 1 + 3 * STEPS), max_size=3)


@pytest.mark.exhaustive
@quick
@given(
    st.sampled_from([[[0, 1]], [[0, 1, 2]], [[0, 1, 2, 3]], [[0, 1], [2, 3]]]),
    st.sampled_from(list(OPTIMIZERS)),
    CUTS,
    CALLS,
    st.integers(0, 3),
    st.booleans(),
)
def test_the_ranks_that_live_have_a_common_version_wherever_each_was(rows, name, messages, calls, lost, late) -> None:
    """The loss of a rank stops the threads of the others at any message and any call."""
    make = OPTIMIZERS[name]
    ranks = trained(rows, make, halved, messages=messages, calls=calls, late=late)
    check_survivors(ranks, ranks[lost % len(ranks)].rank, make, halved)


def halved(owner: Owner, step: int) -> None:
    """Halve the learning rates before each step but the first."""
    for stage in owner.optimizers.values():
        for group in stage.wrapped.param_groups:
            group["lr"] *= 0.5 if step else 1.0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_copy_of_the_neighbour_follows_it_through_all_steps(name: str) -> None:
    make = OPTIMIZERS[name]
    ranks = trained([[0, 1, 2]], make, halved)
    for rank in ranks:
        kept = rank.redundancy.kept
        assert (kept.own.version, kept.neighbour.version) == (STEPS, STEPS)
        assert kept.own_layers == rank.owner.layers
        assert kept.neighbour_layers == rank.owners[rank.rank - 1].layers
        assert_same_parts(kept.neighbour.parts(rank.owner.run), undisturbed(make, (rank.rank - 1) % 3, halved)[STEPS])
        assert_same_parts(kept.own.parts(rank.owner.run), undisturbed(make, rank.rank, halved)[STEPS])


def test_replicas_send_no_states() -> None:
    ranks = trained([[0, 1], [2, 3]], OPTIMIZERS["momentum"])
    assert all(rank.redundancy.kept.neighbour.version is None for rank in ranks)
    assert all(rank.redundancy.kept.own.version == STEPS for rank in ranks)


def test_a_lost_replica_is_no_loss_of_states() -> None:
    """Both ranks of a replica are lost."""
    ranks = trained([[0, 1], [2, 3]], OPTIMIZERS["momentum"], messages={2: 20, 3: 20})
    layers = [layer for own in ranks[0].owners for layer in own.layers]
    assert common_version({rank: ranks[rank].report() for rank in (0, 1)}, layers) is not None


def test_two_neighbours_that_are_lost_together_take_the_only_copies_with_them() -> None:
    ranks = trained([[0, 1, 2]], OPTIMIZERS["momentum"])
    layers = [layer for own in ranks[0].owners for layer in own.layers]
    assert common_version({2: ranks[2].report()}, layers) is None


# ---- changes between steps ------------------------------------------------------------------------------------------


def filled(owner: Owner, step: int) -> None:
    """Change weights, a buffer and an optimizer state by hand before step 2."""
    if step == 2:
        with torch.no_grad():
            for parameter in owner.named.values():
                parameter.clamp_(-0.1, 0.1)
            owner.model[1].running_mean.zero_()
            for stage in owner.optimizers.values():
                for state in stage.wrapped.state.values():
                    state["momentum_buffer"].mul_(0.5)


def frozen(owner: Owner, step: int) -> None:
    """Freeze a layer, unfreeze another, and add a group for it before step 2."""
    if step == 2:
        owner.model[0].requires_grad_(False)
        owner.model[3].requires_grad_(True)
        owner.optimizers[1].wrapped.add_param_group({"params": [*owner.model[3].parameters()], "lr": 0.3})


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("change", [filled, frozen])
def test_changes_by_hand_between_steps_reach_the_copy(change, late) -> None:
    def make(params: Any) -> SGD:
        return SGD([parameter for parameter in params if parameter.requires_grad], lr=0.1, momentum=0.9)

    ranks = trained([[0, 1]], make, change, late=late)
    for lost in (0, 1):
        assert check_survivors(ranks, lost, make, change) == STEPS


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("change", [filled, frozen])
def test_a_change_by_hand_is_in_the_copy_once_the_step_after_it_has_begun(change, late) -> None:
    """Both ranks stop within step 2, when the changes before it have arrived."""

    def make(params: Any) -> SGD:
        return SGD([parameter for parameter in params if parameter.requires_grad], lr=0.1, momentum=0.9)

    ranks = trained([[0, 1]], make, change, calls={0: 8, 1: 8}, late=late)
    layers = [layer for own in ranks[0].owners for layer in own.layers]
    for alive in ranks:
        assert common_version({alive.rank: alive.report()}, layers) == 2
        for own in ranks:
            change_twice = Owner(make, place=own.owner.place)
            for step in range(2):
                change(change_twice, step)
                change_twice.train()
            change(change_twice, 2)
            due = change_twice.parts()
            parts = alive.redundancy.parts(2, alive.owner.run)
            found = [parts[2 * number : 2 * number + 2] for number in range(2)]
            place = own.owner.place
            assert_same_parts(next(two for two in found if f"parameter/{place}0.weight" in two[0].tensors), due)


def test_settings_that_were_changed_after_the_common_version_are_reported() -> None:
    """Rank 0 has begun step 2 with half the learning rate; rank 1 has not sent its own change, and is lost."""
    ranks = trained([[0, 1]], OPTIMIZERS["momentum"], halved, calls={1: 7})
    assert check_survivors(ranks, 1, OPTIMIZERS["momentum"], halved) == 2
    changes = ranks[0].redundancy.settings_changes(2)
    assert {(change.step, change.number, change.before["lr"], change.now["lr"]) for change in changes} == {
        (2, 0, 0.05, 0.025)
    }
    assert all(isinstance(change, SettingsChange) for change in changes)


def test_what_an_optimizer_counts_in_its_groups_is_no_change_by_the_user() -> None:
    ranks = trained([[0, 1]], OPTIMIZERS["counts in its groups"], calls={0: 8, 1: 8})
    for version in (1, 2):
        assert all(change.before == change.now for change in ranks[0].redundancy.settings_changes(version))


def test_a_change_is_reported_although_the_optimizer_counts_in_its_groups() -> None:
    """The settings before the change are those that a state of the version has, so that the change fits it."""
    ranks = trained([[0, 1]], OPTIMIZERS["counts in its groups"], halved, calls={0: 8, 1: 8})
    own = ranks[0].redundancy
    assert {(change.before["count"], change.before["lr"], change.now["lr"]) for change in own.settings_changes(2)} == {
        (2, 0.05, 0.025)
    }


def test_parts_that_overlap_make_up_one_state() -> None:
    """A rank holds the layers of its stages before a change of plan; another one has those after it."""
    owner = Owner(grouped)
    owner.train()
    whole, _ = owner.parts()

    def cut(layers: str) -> CheckpointPart:
        names = [key for key, entry in whole.entries.items() if entry.name[0] in layers]
        parameters = {name: own for name, own in whole.values["parameters"].items() if name[0] in layers}
        return CheckpointPart(
            {key: whole.tensors[key] for key in names},
            {key: whole.entries[key] for key in names},
            {"groups": whole.values["groups"], "parameters": parameters},
        )

    parts = [cut("013"), cut("34"), cut("13"), cut("4")]
    described: list[Any] = []
    collectives = SimpleNamespace(gathered_in_plane=lambda own: described.append(own) or {0: own, 1: own})
    grid = SimpleNamespace(replica=0)
    run = replace(owner.run, host=SimpleNamespace(collectives=collectives, grid=grid))
    state = held_in_parts(run, parts)
    assert set(state.saved.entries) == set(whole.entries)
    groups = state.saved.values["groups"]
    found = {name: groups[own["group"]]["options"] for name, own in state.saved.values["parameters"].items()}
    due = whole.values["parameters"].items()
    assert found == {name: whole.values["groups"][own["group"]]["options"] for name, own in due}
    assert state.own.tensors.keys() == whole.tensors.keys()


# ---- other stages ---------------------------------------------------------------------------------------------------


class Moving(Rank):
    """A rank that takes over the layers of another rank after a step."""

    def run(self, num_steps: int = STEPS) -> None:
        self.moves_after = 1
        super().run(num_steps)

    def step(self, step: int) -> None:
        super().step(step)
        if step == self.moves_after:
            self.owners = self.owners[1:] + self.owners[:1]
            for number, owner in enumerate(self.owners):  # the layers that come have the state of the same version
                if owner is not self.owner and number == self.row.index(self.rank):
                    while owner.version <= step:
                        owner.train()
            self.owner = self.owners[self.row.index(self.rank)]
            self.use(step + 1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rows", [[[0, 1]], [[0, 1, 2]], pytest.param([[0, 1, 2, 3]], marks=pytest.mark.exhaustive)])
def test_wherever_a_rank_stops_while_layers_move_the_others_have_a_common_version(rows, monkeypatch) -> None:
    monkeypatch.setitem(globals(), "Rank", Moving)
    check_wherever_a_rank_stops(rows)
