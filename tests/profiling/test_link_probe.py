"""The link probe: exact on a virtual clock, correct on real connections, and right about a host's network."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipesched import Costs, validate
from pipesched.profiling.link_probe import find_links
from pipesched.runtime.transport.sockets import own_host
from pipesched.simulation.links import Link, Links
from pipesched.testing.fake_executor import run_virtual
from tests.support.jobs import links as jobs
from tests.support.rank_processes import Ranks

pytestmark = pytest.mark.timeout(60)


def probed(num_ranks: int, links: Links) -> Links:
    """The links that the probe measures if these are the true ones."""

    def run(program: Any, sizes: Any) -> Any:
        validate(program)
        free = (0,) * program.num_stages
        return run_virtual(program, Costs(free, free, free, output_bytes=sizes, links=links)).spans

    return find_links(num_ranks, run)


@settings(max_examples=20)
@given(data=st.data(), num_ranks=st.integers(1, 5), contended=st.booleans())
def test_the_probe_finds_what_the_links_are(data: Any, num_ranks: int, contended: bool) -> None:
    latencies, speeds = st.sampled_from([0, 1e-4, 0.02, 1.5]), st.sampled_from([None, 1e5, 2.5e6, 1e9, 4e11])
    pairs = [(a, b) for b in range(num_ranks) for a in range(b)]
    special = {}
    for a, b in pairs:
        latency_s = data.draw(latencies)
        special |= {(a, b): Link(latency_s, data.draw(speeds)), (b, a): Link(latency_s, data.draw(speeds))}
    found = probed(num_ranks, Links(special=special, contended=contended))
    assert found.contended
    assert dict(found.special).keys() == special.keys()
    for pair, link in special.items():
        seen = found.link(*pair)
        assert seen.latency_s == pytest.approx(link.latency_s, abs=1e-12)
        if link.bytes_per_s is None:
            assert seen.bytes_per_s is None or seen.bytes_per_s > 1e15  # a difference of rounded times
        else:
            assert seen.bytes_per_s == pytest.approx(link.bytes_per_s, rel=1e-3)
        assert seen.spread < 1e-3


def test_collectives_over_replicas_are_measured_and_decide_the_times_of_reductions(ranks: Ranks) -> None:
    (links, times), *others = ranks.run(4, jobs.collectives, 0.02)
    assert all(found == links for found, _ in others)
    assert [one.ranks for one in links.collectives] == [(0, 2), (1, 3)]
    for one in links.collectives:
        assert one.all_gather.latency_s >= 0.02
        assert one.all_reduce.latency_s >= 0.02
        assert one.reduce_scatter.latency_s > 0
    expected = [links.all_reduce_s(size * 4, ring) for size, ring in ((8 * 8 + 8, (0, 2)), (8 * 64 + 64, (1, 3)))]
    assert [times["0REDUCE0"], times["1REDUCE0"]] == pytest.approx(expected)


def test_latency_that_differs_by_direction_counts_half_each_way() -> None:
    links = Links(special={(0, 1): Link(0.01, 1e6), (1, 0): Link(0.03, 1e6)})
    found = probed(2, links)
    assert found.link(0, 1).latency_s == found.link(1, 0).latency_s == pytest.approx(0.02)


@pytest.mark.parametrize("num_ranks", range(2, 10))
def test_a_rank_talks_to_one_other_at_a_time(num_ranks: int) -> None:
    at_once: list[list[int]] = []

    def run(program: Any, sizes: Any) -> Any:
        at_once.append([rank for chain in range(0, program.num_stages, 3) for rank in program.placement[chain:][:2]])
        return run_virtual(program, Costs.uniform(program.num_stages, forward_s=0)).spans

    find_links(num_ranks, run)
    assert all(len(set(busy)) == len(busy) for busy in at_once)
    assert max(map(len, at_once)) == num_ranks - num_ranks % 2


def test_a_link_that_delays_is_found_among_others(ranks: Ranks) -> None:
    delay_s = 0.008
    answers = ranks.run(3, jobs.probe, {(0, 1): delay_s, (1, 0): delay_s})
    assert answers == [answers[0]] * 3
    for (sender, receiver), link in answers[0].special:
        assert (link.latency_s >= delay_s) == ({sender, receiver} == {0, 1})
        assert link.bytes_per_s is not None


def test_overheads_of_ranks_in_processes_are_the_same_for_all(ranks: Ranks) -> None:
    answers = ranks.run(2, jobs.overheads)
    assert answers == [answers[0]] * 2
    assert answers[0].action_s > 0  # the exact value is tested on the virtual clock
    assert len(answers[0].crowding) == 2


class StoreAt:
    port = 29500

    def __init__(self, host: str) -> None:
        self.host = host


def test_a_hosts_address_is_of_the_interface_that_gloo_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert own_host(StoreAt("127.0.0.2")) == "127.0.0.1"
    assert own_host(object()) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no such interface")
    assert own_host(StoreAt("127.0.0.2")) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,other")
    assert own_host(StoreAt("192.0.2.77")) == "127.0.0.1"
