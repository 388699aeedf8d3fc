"""Which ranks go on after a loss, and from which version of their states."""

import errno
import socket
from typing import Any

import pytest

from pipesched.elastic.survivors import HeldLayers, RankReport, common_version, connected_part, may_go_on
from pipesched.runtime.coordination import failure_notices
from pipesched.runtime.coordination.failure_notices import Address, asked_of
from pipesched.runtime.coordination.rank_activity import ENDED, SILENT


def reports(**apart: list[int]) -> dict[int, RankReport]:
    return {int(rank[1:]): RankReport([], 0, others) for rank, others in apart.items()}


def test_of_two_ranks_that_are_apart_the_higher_is_given_up_but_never_the_leader() -> None:
    assert connected_part(0, reports(r0=[], r1=[2], r2=[1], r3=[])) == [0, 1, 3]
    assert connected_part(0, reports(r0=[], r1=[0], r2=[], r3=[])) == [0, 2, 3]
    assert connected_part(1, reports(r1=[3], r2=[], r3=[])) == [1, 2]


def test_the_rank_that_is_apart_from_the_most_others_is_given_up_first() -> None:
    assert connected_part(0, reports(r0=[], r1=[2, 3], r2=[], r3=[])) == [0, 2, 3]


def test_a_rank_that_has_not_come_is_no_end_of_a_link() -> None:
    assert connected_part(0, reports(r0=[1], r2=[1], r3=[])) == [0, 2, 3]


def test_the_larger_part_goes_on_and_of_equal_parts_the_one_with_the_lowest_rank() -> None:
    assert may_go_on([1, 2, 3], [0])
    assert not may_go_on([0], [1, 2])
    assert may_go_on([0, 3], [1, 2])
    assert not may_go_on([1, 2], [0, 3])


def test_the_latest_version_counts_that_all_layers_have_and_no_rank_has_passed() -> None:
    held = {
        0: RankReport([HeldLayers(["a"], [3, 4]), HeldLayers(["c"], [4])], 4),
        1: RankReport([HeldLayers(["b"], [3, 4])], 4),
    }
    assert common_version(held, ["a", "b", "c"]) == 4
    held[1] = RankReport([HeldLayers(["b"], [3, 4])], 3)
    assert common_version(held, ["a", "b"]) == 3
    assert common_version(held, ["a", "b", "c"]) is None


@pytest.mark.parametrize("error", [errno.ENETUNREACH, errno.EHOSTUNREACH])
def test_a_rank_that_cannot_be_reached_has_not_ended(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """It may live on the other side of a broken link, and then both sides must not go on."""

    class Socket(socket.socket):
        def connect_ex(self, address: Any) -> int:
            return error

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = Address("rank 1", 1, "127.0.0.1", port, "word")
    assert asked_of([address], {}, 0.2) == [ENDED]
    monkeypatch.setattr(failure_notices.socket, "socket", Socket)
    assert asked_of([address], {}, 0.2) == [SILENT]
