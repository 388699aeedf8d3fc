"""A rank host: where ranks are is data, and in one process the collectives answer at once."""

from dataclasses import replace

import pytest
import torch

from pipesched.errors import DeviceCountError, ExecutionError
from pipesched.runtime.collectives import LocalCollectives
from pipesched.runtime.connected_rank import ConnectedRank
from pipesched.runtime.process_collectives import ProcessCollectives
from pipesched.runtime.rank_grid import RankGrid
from pipesched.runtime.rank_host import host_of_threads
from pipesched.runtime.transport.connections import HostTransport

CPU = torch.device("cpu")
META = torch.device("meta")
#: Two replicas of a pipeline of three ranks, seen from the second rank of the second replica.
MESH = RankGrid(
    rows=((0, 1, 2), (3, 4, 5)), rank=4, all_devices=(CPU,) * 3, names=tuple("abcdef"), timeout_s=5.0, inputs="all"
)


def test_threads_are_all_in_the_one_process():
    grid = RankGrid.threads([CPU, META])
    assert [grid.holds(rank) for rank in range(2)] == [True, True]
    assert (grid.rank, grid.position, grid.replica, grid.num_processes) == (0, 0, 0, 1)
    assert not grid.compares_batches


def test_a_process_holds_its_own_rank_of_its_replica():
    assert [MESH.holds(rank) for rank in range(3)] == [False, True, False]
    assert (MESH.position, MESH.replica, MESH.peers, MESH.num_processes) == (1, 1, (1, 4), 6)


def test_processes_that_all_pass_a_batch_compare_it():
    assert MESH.compares_batches
    assert not replace(MESH, inputs="first").compares_batches
    assert (MESH.replicas_per_batch, replace(MESH, inputs="first").replicas_per_batch) == (1, 2)


def test_a_plan_may_use_fewer_ranks_and_the_next_plan_more():
    fewer = RankGrid.threads([CPU, META, CPU]).use(2)
    assert (fewer.devices, fewer.num_idle) == ((CPU, META), 1)
    assert fewer.use(3).devices == (CPU, META, CPU)


def test_without_a_plan_every_rank_of_a_mesh_holds_stages():
    with pytest.raises(DeviceCountError, match="the mesh has 3 ranks, but the program uses 2; use a mesh of 2 ranks"):
        MESH.use(2, all_ranks=True)
    assert RankGrid.threads([CPU] * 3).use(2, all_ranks=True).num_idle == 1


def test_the_threads_of_a_host_start_with_its_ranks():
    host = host_of_threads([CPU] * 3, 1).use(2)
    executor = host.executor
    assert executor._threads == []
    executor.start()
    started = [*executor._threads]
    executor.start()
    assert executor._threads == started
    assert len(started) == 2
    host.close()
    assert not any(thread.is_alive() for thread in started)


def test_a_host_that_was_never_started_closes():
    host = host_of_threads([CPU], 1)
    host.close()
    assert host.executor.closed
    with pytest.raises(ExecutionError, match="it was closed before this step"):
        host.executor.check_open("this step")


def test_in_one_process_collectives_answer_at_once():
    ranks = LocalCollectives()
    loss = torch.tensor(2.0)
    assert ranks.agreed(lambda: 3) == ranks.from_rank(5, lambda: 3) == 3
    assert ranks.gathered(4) == ranks.gathered_in_all(4) == ranks.gather_over_replicas(4) == [4]
    assert ranks.loss(1, lambda: loss) is loss
    assert ranks.loss_with_metrics(1, (loss, None))() == (loss, None)
    assert ranks.sum_of_replicas([(loss, None)], CPU) == (loss, None)
    assert ranks.shared("own")() == [["own"]]
    with ranks.connected("gather_model") as same, ranks.stopping_all("a call"):
        assert same is ranks
    with pytest.raises(KeyError, match="lost"):
        ranks.fail("a call", KeyError("lost"))


def test_a_rank_sends_over_the_transport_that_it_is_given(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)

    class Group:
        rank, size, get_group_store = staticmethod(lambda: 0), staticmethod(lambda: 1), staticmethod(lambda: store)

    class Counting(HostTransport):
        count = 0

        def connect(self, *place):
            self.count += 1
            return super().connect(*place)

    transport = Counting()
    rank = ConnectedRank(Group, RankGrid.single(Group, timeout_s=5), transport=transport)
    rank.close()
    again = rank.reconnected()
    assert ProcessCollectives(again).gathered("own") == ["own"]
    assert transport.count == 2
    again.close()
