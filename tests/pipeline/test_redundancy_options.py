"""The options redundancy=, on_failure= and on_recovery=: what they refuse, and the remedy that each error names."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.optim import SGD

from pipesched import Distributed
from pipesched.errors import InputError, PipeschedError
from pipesched.pipeline.checks.redundancy_checks import Obstacle, check_redundancy
from pipesched.pipeline.construction import _check_survival
from pipesched.runtime.rank_grid import RankGrid
from tests.support.jobs import survival
from tests.support.rank_processes import Ranks
from tests.support.refused_pipelines import ONES, build, linears, refused

NEIGHBOUR = Distributed(redundancy="neighbour")


def sgd(params: Any) -> SGD:
    return SGD(params, lr=0.1)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"redundancy": "everywhere"},
            "redundancy= must be one of None, 'neighbour'; got 'everywhere'; pass one of them",
        ),
        ({"redundancy": True}, "redundancy= must be one of None, 'neighbour'; got True; pass one of them"),
        (
            {"redundancy": "neighbour", "on_failure": "ignore"},
            "on_failure= must be one of 'raise', 'recover'; got 'ignore'; pass one of them",
        ),
        (
            {"redundancy": "neighbour", "on_failure": None},
            "on_failure= must be one of 'raise', 'recover'; got None; pass one of them",
        ),
        (
            {"on_failure": "recover"},
            "a pipeline recovers from copies of its ranks' states; on_failure='recover' was passed without "
            "redundancy=; pass redundancy='neighbour', too",
        ),
        (
            {"on_recovery": print},
            "a pipeline recovers from copies of its ranks' states; on_recovery= was passed without redundancy=; pass "
            "redundancy='neighbour', too",
        ),
        (
            {"rendezvous": "job.json"},
            "a pipeline recovers from copies of its ranks' states; rendezvous= was passed without redundancy=; pass "
            "redundancy='neighbour', too",
        ),
    ],
)
def test_an_option_of_survival_that_is_not_taken(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError) as caught:
        Distributed(**given)
    assert str(caught.value) == text


@pytest.mark.parametrize("function", [3, "a name", lambda: None, lambda one, two: None])
def test_on_recovery_takes_a_function_of_the_outcome(function: Any) -> None:
    with pytest.raises(PipeschedError, match="on_recovery") as caught:
        Distributed(redundancy="neighbour", on_recovery=function)
    assert str(caught.value).count("; ") >= 2


def test_recover_needs_copies() -> None:
    with build(optimizer=sgd, schedule="1f1b") as pipe:
        with pytest.raises(InputError) as caught:
            pipe.recover()
        assert str(caught.value) == (
            "recover() needs copies of the ranks' states; this pipeline keeps none; pass "
            "distributed=Distributed(redundancy='neighbour') to Pipeline, or start again from the last checkpoint"
        )
        pipe.step(ONES, target=ONES)  # the pipeline stays usable


def test_recover_without_a_loss_is_refused_and_the_pipeline_stays_usable(ranks: Ranks) -> None:
    for said, same in ranks.run(4, survival.recovers_without_a_loss):
        assert said == (
            "recover() goes on after the loss of a rank; all 4 ranks of this pipeline are connected; call it only "
            "after a RankLost error"
        )
        assert same


# ---- what cannot be copied ------------------------------------------------------------------------------------------

RULE = "redundancy= lets the ranks of a mesh go on after the loss of a rank, from copies of their states; "
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def grid(*rows: list[int], device: torch.device = CPU, **options: Any) -> RankGrid:
    names = tuple(f"rank {rank}" for row in rows for rank in row)
    return RankGrid(rows=rows, rank=0, all_devices=(device,) * len(rows[0]), names=names, **options)


class Stateful(nn.Module):
    """A module with a state that is no buffer."""

    def get_extra_state(self) -> int:
        return 1


def said(own: RankGrid, *roots: object, obstacles: Any = ()) -> str:
    with pytest.raises(InputError) as caught:
        check_redundancy(own, roots, obstacles)
    return str(caught.value).removeprefix(RULE)


@pytest.fixture
def _world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "get_world_size", lambda: 4)


@pytest.mark.usefixtures("_world")
@pytest.mark.parametrize(
    ("own", "text"),
    [
        (grid([0, 1], in_one_process=True), "this pipeline runs in one process, whose loss is the loss of all; pass"),
        (grid([0]), "this mesh has only one rank; pass a mesh of several ranks, or"),
        (
            grid([0, 1]),
            "torch's default process group is made anew after a loss; it has 4 ranks, but the mesh of this pipeline "
            "has 2; pass a mesh of all ranks, or",
        ),
        (
            grid([0, 1], [2, 3], num_shards=2),
            "replicas that divide weights are no copies of each other; pass axes= without shard, or",
        ),
        (
            grid([0], [1], [2], [3]),
            "each replica has only one rank, so its batch is lost with the rank; use pipelines of several ranks, or",
        ),
        (
            grid([0, 1, 2, 3], device=CUDA),
            "the copies are updated on the host, which rounds differently from a device; train on CPUs, or",
        ),
    ],
)
def test_ranks_whose_states_cannot_be_copied(own: RankGrid, text: str) -> None:
    assert said(own, linears()).startswith(text)
    assert said(own, linears()).endswith("or leave redundancy= out")


@pytest.mark.usefixtures("_world")
@pytest.mark.parametrize("place", ["model", "loss function"])
def test_a_module_with_a_state_that_is_no_buffer_is_refused(place: str) -> None:
    modules = nn.Sequential(nn.Linear(3, 3), Stateful()), nn.MSELoss()
    roots = modules if place == "model" else (linears(), nn.Sequential(nn.MSELoss(), Stateful()))
    assert said(grid([0, 1, 2, 3]), *roots) == (
        "module '1' has get_extra_state, whose value a step may change; keep such state in buffers, or leave "
        "redundancy= out"
    )


@pytest.mark.usefixtures("_world")
def test_ranks_and_modules_whose_states_can_be_copied_are_taken() -> None:
    for own in (grid([0, 1, 2, 3]), grid([0, 1], [2, 3])):
        check_redundancy(own, (linears(), None), [Obstacle(False, "", "")])
    check_redundancy(grid([0, 1, 2, 3]), (linears(), len), [])


OPTIONS = {"optimizer": sgd, "wrap": None, "zero": 0, "survives": "told", "model": linears(), "loss_fn": None}


@pytest.mark.usefixtures("_world")
@pytest.mark.parametrize(
    ("options", "own", "streams", "text"),
    [
        (
            {"optimizer": None},
            grid([0, 1, 2, 3]),
            False,
            "the copy of a state runs the updates again, and there is no optimizer=; pass it, or",
        ),
        (
            {},
            grid([0, 1, 2, 3]),
            True,
            "the steps of 'pipedream' overlap, so the ranks have no common version; choose a schedule that ends each "
            "step before the next, such as 1f1b, or",
        ),
        (
            {"wrap": len},
            grid([0, 1, 2, 3]),
            False,
            "wrap= has changed each stage as a whole, so its layers cannot move; leave wrap= out, or",
        ),
        (
            {"zero": 2},
            grid([0, 1], [2, 3]),
            False,
            "with zero=2 replicas are no copies of each other; pass zero=0, or",
        ),
        (
            {"survives": "untold"},
            grid([0, 1], [2, 3]),
            False,
            "a loss changes the number of replicas, so your data loader must divide its batches anew; pass "
            "on_recovery=, or on_failure='raise', or",
        ),
    ],
)
def test_options_with_which_states_cannot_be_copied(options, own: RankGrid, streams: bool, text: str) -> None:
    plain = SimpleNamespace(name="pipedream")
    programs = SimpleNamespace(streams=streams, full=SimpleNamespace(plain=plain))
    with pytest.raises(InputError) as caught:
        _check_survival(SimpleNamespace(**OPTIONS | options), own, programs)
    assert str(caught.value) == f"{RULE}{text} leave redundancy= out"


@pytest.mark.usefixtures("_world")
def test_one_replica_need_not_be_told_of_a_loss() -> None:
    programs = SimpleNamespace(streams=False, full=SimpleNamespace(plain=SimpleNamespace(name="1f1b")))
    _check_survival(SimpleNamespace(**OPTIONS | {"survives": "untold"}), grid([0, 1, 2, 3]), programs)


def test_a_pipeline_in_one_process_keeps_no_copies() -> None:
    match = "this pipeline runs in one process, whose loss is the loss of all; pass mesh=, or leave redundancy= out"
    refused(InputError, ValueError, match, optimizer=sgd, schedule="1f1b", distributed=NEIGHBOUR)


def test_all_ranks_of_a_mesh_refuse_what_cannot_be_copied(ranks: Ranks) -> None:
    for (other_group,) in ranks.run(2, survival.refusals, [{}]):
        assert "it has 4 ranks, but the mesh of this pipeline has 2; pass a mesh of all ranks" in other_group
