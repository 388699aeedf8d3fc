"""Links: latency and bandwidth between ranks, and whether messages share a link."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pipesched.checks import LARGEST, as_list, check_number, is_count, is_whole, shown
from pipesched.errors import ScheduleError
from pipesched.json_files import maybe, read_fields
from pipesched.program.action_arrays import Ints

__all__ = ["Algorithm", "Collectives", "Link", "Links", "check_speed", "check_times", "plain", "slowest_of"]

#: How the ranks of a collective exchange data: "ring" or "tree".
Algorithm = Literal["ring", "tree"]


def plain(value: Any) -> Any:
    """Convert a numpy scalar to a Python number, which can be written as JSON and, if whole, never overflows."""
    return value.item() if isinstance(value, np.generic) else value


def check_times(times: Sequence[float], name: str) -> None:
    """Raise ScheduleError for a time that is negative or not finite."""
    for index, value in enumerate(times):
        check_number(value, f"{name} {index}")


def check_speed(bytes_per_s: Any, name: str, of: str) -> None:
    """Raise ScheduleError unless the speed is positive or None (no limit)."""
    if bytes_per_s is None:
        return
    check_number(bytes_per_s, f"the {name} of {of}")
    if bytes_per_s * LARGEST < 1:
        raise ScheduleError(
            f"a speed must be above 0, in bytes per second, or None if it is unlimited or unknown; {name} is "
            f"{bytes_per_s!r} for {of}; for example, pass 20e9"
        )


@dataclass(frozen=True)
class Link:
    """A link from one rank to another: a message of n bytes takes ``latency_s + n / bytes_per_s`` seconds.

    Attributes:
        latency_s: latency in seconds. Default: 0.
        bytes_per_s: bandwidth in bytes per second. Default: None, unlimited.
        spread: variation of the measured times: (slowest - fastest) / median. Default: 0.

    """

    latency_s: float = 0
    bytes_per_s: float | None = None
    spread: float = 0

    def __post_init__(self) -> None:
        check_number(self.latency_s, "the latency_s of a link")
        check_number(self.spread, "the spread of a link")
        check_speed(self.bytes_per_s, "bytes_per_s", "a link")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Link":
        """Make a link from the dict that ``asdict`` returned. Raises ScheduleError for invalid values."""
        return read_fields(cls, values, "a link must have")

    @property
    def byte_s(self) -> float:
        """The time for which one byte occupies the link, in seconds."""
        return 0 if self.bytes_per_s is None else 1 / self.bytes_per_s

    def time_s(self, num_bytes: float) -> float:
        """Return the time in seconds of a message or, if the link describes a collective, of the collective."""
        return self.latency_s + num_bytes * self.byte_s

    def faster(self, factor: float) -> "Link":
        """Return a link that transfers every message ``factor`` times as fast."""
        speed = None if self.bytes_per_s is None else self.bytes_per_s * factor
        return replace(self, latency_s=self.latency_s / factor, bytes_per_s=speed)


@dataclass(frozen=True)
class Collectives:
    """Measured times of collectives. A collective on a tensor of n bytes takes ``latency_s + n / bytes_per_s`` seconds.

    Attributes:
        ranks: the ranks that take part.
        all_reduce: the time of an all-reduce.
        reduce_scatter: the time of a reduce-scatter. n is the size of the whole tensor.
        all_gather: the time of an all-gather. n is the size of the gathered tensor.
        broadcast: the time of a broadcast. Default: None, not measured.
        reduce: the time of a sum that one rank receives. Default: None, not measured.

    """

    ranks: tuple[int, ...]
    all_reduce: Link
    reduce_scatter: Link
    all_gather: Link
    broadcast: Link | None = None
    reduce: Link | None = None

    def __post_init__(self) -> None:
        rule = "ranks of Collectives must list each participating rank once"
        object.__setattr__(self, "ranks", tuple(as_list(self.ranks, rule, "for example, pass (0, 2)")))
        if not self.ranks or len({*self.ranks}) < len(self.ranks) or not all(is_count(one, 0) for one in self.ranks):
            raise ScheduleError(f"{rule}; got {shown(self.ranks)}; for example, pass (0, 2)")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Collectives":
        """Make collectives from the dict that ``asdict`` returned. Raises ScheduleError for invalid values."""
        link = Link.from_dict
        links: dict[str, Any] = {"all_reduce": link, "reduce_scatter": link, "all_gather": link}
        return read_fields(cls, values, "collectives must have", **links, broadcast=maybe(link), reduce=maybe(link))

    def faster(self, factor: float) -> "Collectives":
        """Return collectives that are ``factor`` times as fast."""
        links = {name: link.faster(factor) for name, link in vars(self).items() if isinstance(link, Link)}
        return replace(self, **links)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain lists and numbers for JSON, without what was not measured."""
        return {name: value for name, value in asdict(self).items() if value is not None} | {"ranks": list(self.ranks)}


@dataclass(frozen=True)
class Links:
    """The links between all ranks. Each pair of ranks has one link in each direction.

    ::

        Links(inside=Link(2e-6, 100e9), between=Link(10e-6, 12e9), hosts=(0, 0, 1, 1))

    Attributes:
        inside: the link between ranks of one host. Default: messages take no time.
        between: the link between ranks of different hosts. Default: messages take no time.
        hosts: the host number of each rank. Default: all on one host.
        special: links of individual pairs of ranks: a list of ``((from rank, to rank), link)``, or a mapping from such
            pairs to links. Default: none.
        contended: whether a link carries messages one at a time, in the order in which they are sent. Default:
            False, messages do not delay each other.
        collectives: measured collectives, one entry for each group of ranks. Default: none; times of collectives are
            computed from the links.
        algorithm: what collectives that were not measured take. Both algorithms send the same bytes. Of n ranks, each
            waits for n - 1 messages one after another in an all-gather or a reduce-scatter in a "ring", and for
            log2(n), rounded up, in a "tree"; in an all-reduce for twice as many. A broadcast sends the whole tensor
            in each round of a "tree", and piece by piece along a "ring". Default: "ring".

    Raises:
        ScheduleError: for invalid values.

    """

    inside: Link = Link()
    between: Link = Link()
    hosts: tuple[int, ...] = ()
    special: tuple[tuple[tuple[int, int], Link], ...] = ()
    contended: bool = False
    collectives: tuple[Collectives, ...] = ()
    algorithm: Algorithm = "ring"

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, str) or self.algorithm not in get_args(Algorithm):
            raise ScheduleError(
                f"the algorithm of collectives must be 'ring' or 'tree'; got {shown(self.algorithm)}; pass one of them"
            )
        rule = "hosts must be a list with the host number of each rank"
        object.__setattr__(self, "hosts", tuple(as_list(self.hosts, rule, "for example, pass (0, 0, 1, 1)")))
        if not all(is_count(host, 0) for host in self.hosts):
            raise ScheduleError(f"{rule}; got {shown(self.hosts)}; pass whole numbers, at least 0")
        pairs = self.special.items() if isinstance(self.special, Mapping) else self.special
        try:
            special = sorted((((a, b), link) for (a, b), link in pairs), key=lambda pair: pair[0])
            if not all(is_whole(rank) and rank >= 0 for ranks, _ in special for rank in ranks):
                raise TypeError  # noqa: TRY301
        except (TypeError, ValueError):
            raise ScheduleError(
                f"special must map pairs of ranks to links, {{(from rank, to rank): link}}; got {shown(self.special)}; "
                f"for example, pass {{(0, 1): Link(1e-6, 10e9)}}"
            ) from None
        twice = next((one for (one, _), (other, _) in pairwise(special) if one == other), None)
        if twice is not None:
            raise ScheduleError(
                f"a pair of ranks may have only one special link; {twice} has several; remove the duplicates"
            )
        object.__setattr__(self, "special", tuple(((int(a), int(b)), link) for (a, b), link in special))
        for link in (self.inside, self.between, *(link for _, link in self.special)):
            if not isinstance(link, Link):
                raise ScheduleError(f"a link must be a pipesched.Link; got {link!r}; pass Link(latency_s, bytes_per_s)")
        measured = tuple(as_list(self.collectives, _COLLECTIVES, _AS_TO_DICT))
        object.__setattr__(self, "collectives", measured)
        if not all(isinstance(one, Collectives) for one in measured) or len(self._collectives) < len(measured):
            raise ScheduleError(f"{_COLLECTIVES}; got {shown(measured)}; {_AS_TO_DICT}")

    @classmethod
    def of_hosts(cls, ranks_per_host: int, num_ranks: int, **links: Any) -> "Links":
        """Create the links between ranks that are numbered host by host, with the same number of ranks on each host.

        Args:
            ranks_per_host: the number of ranks on each host.
            num_ranks: the total number of ranks.
            links: the other fields of Links.

        """
        for name, count in (("ranks_per_host", ranks_per_host), ("num_ranks", num_ranks)):
            if not is_count(count):
                raise ScheduleError(f"a host must have at least one rank; got {name}={shown(count)}; pass 1 or more")
        return cls(hosts=tuple(rank // ranks_per_host for rank in range(num_ranks)), **links)

    def faster(self, factor: float) -> "Links":
        """Return links of which each transfers every message and collective ``factor`` times as fast."""
        return replace(
            self,
            inside=self.inside.faster(factor),
            between=self.between.faster(factor),
            special=tuple((ranks, link.faster(factor)) for ranks, link in self.special),
            collectives=tuple(group.faster(factor) for group in self.collectives),
        )

    def link(self, sender: int, receiver: int) -> Link:
        """Return the link from one rank to another. Raises ScheduleError if ``hosts`` has no entry for a rank."""
        if (sender, receiver) in self._special:
            return self._special[sender, receiver]
        if not self.hosts:
            return self.inside
        return self.inside if self._host(sender) == self._host(receiver) else self.between

    def among(self, ranks: Sequence[int]) -> "Links":
        """Return the links between these ranks, which are renumbered 0, 1, ... in the given order.

        Hosts are also renumbered. Raises ScheduleError if ``hosts`` has no entry for a rank.
        """
        places = {rank: place for place, rank in enumerate(ranks)}
        hosts = [self._host(rank) for rank in ranks] if self.hosts else []
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        special = tuple(
            ((places[one], places[other]), link)
            for (one, other), link in self.special
            if one in places and other in places
        )
        collectives = tuple(
            replace(one, ranks=tuple(map(places.__getitem__, one.ranks)))
            for one in self.collectives
            if places.keys() >= {*one.ranks}
        )
        own = tuple(map(numbers.__getitem__, hosts))
        return replace(self, hosts=own, special=special, collectives=collectives)

    def _host(self, rank: int) -> int:
        if rank >= len(self.hosts):
            raise ScheduleError(
                f"hosts must have an entry for each rank; hosts has length {len(self.hosts)}, so rank {rank} has no "
                f"entry; add the missing entries"
            )
        return self.hosts[rank]

    def all_reduce_s(self, num_bytes: float, ranks: Sequence[int], *, direct: bool = False) -> float:
        """Return the time of an all-reduce in seconds.

        If all-reduces were not measured, the time is that of a reduce-scatter plus that of an all-gather.

        For example, these are the times of a stage's two buckets, for ``Costs.reduce_s``, if the link to the other
        replica has a bandwidth of 10 GB/s:

            >>> links = Links(inside=Link(latency_s=20e-6, bytes_per_s=10e9))
            >>> [links.all_reduce_s(size, range(2)) for size in (50_000_000, 100_000_000)]
            [0.00504, 0.01004]

        Args:
            num_bytes: the size of the tensor.
            ranks: the ranks that take part, in the order of the ring. The slowest link determines the time.
            direct: as for `reduce_scatter_s`. Default: False.

        """
        gather_s = self._ring_s(num_bytes, ranks)
        scatter_s = self._direct_s(num_bytes, ranks) if direct else gather_s
        return self._collective_s("all_reduce", scatter_s + gather_s, num_bytes, ranks)

    def all_gather_s(self, num_bytes: float, ranks: Sequence[int]) -> float:
        """Return the time of an all-gather in seconds. ``num_bytes`` is the size of the gathered tensor."""
        return self._collective_s("all_gather", self._ring_s(num_bytes, ranks), num_bytes, ranks)

    def reduce_scatter_s(self, num_bytes: float, ranks: Sequence[int], *, direct: bool = False) -> float:
        """Return the time of a reduce-scatter in seconds.

        Args:
            num_bytes: the size of the whole tensor.
            ranks: the ranks that take part, in the order of the ring. The slowest link determines the time.
            direct: whether each rank sends every other rank its part in one round, as tensor groups do, so that the
                latency is paid once. Default: False.

        """
        own_s = self._direct_s(num_bytes, ranks) if direct else self._ring_s(num_bytes, ranks)
        return self._collective_s("reduce_scatter", own_s, num_bytes, ranks)

    def broadcast_s(self, num_bytes: float, ranks: Sequence[int]) -> float:
        """Return the time of a broadcast in seconds. The root may be any rank.

        In a tree, each of log2(n) rounds, rounded up, sends the whole tensor. In a ring, the tensor goes from rank to
        rank in small pieces, as in NCCL, so n - 1 latencies are added to the time of the whole tensor on one link.

            >>> ring = Links(inside=Link(latency_s=20e-6, bytes_per_s=10e9))
            >>> f"{ring.broadcast_s(50_000_000, range(4)):.5f}"
            '0.00506'

        Args:
            num_bytes: the size of the tensor.
            ranks: the ranks that take part, in the order of the ring. The slowest link determines the time.

        """
        ring, others = self._ring(num_bytes, ranks), len(ranks) - 1
        latency_s = max(link.latency_s for link in ring)
        sent_s = num_bytes * max(link.byte_s for link in ring)
        sent_once_s = others * latency_s + min(others, 1) * sent_s
        in_tree_s = others.bit_length() * (latency_s + sent_s)
        own_s = in_tree_s if self.algorithm == "tree" else sent_once_s
        return self._collective_s("broadcast", own_s, num_bytes, ranks)

    def reduce_s(self, num_bytes: float, ranks: Sequence[int]) -> float:
        """Return the time in seconds of a sum that one rank receives. The root may be any rank.

        The root receives the tensors of the n - 1 other ranks in one round, and adds them in ascending order.

            >>> f"{Links(inside=Link(latency_s=20e-6, bytes_per_s=10e9)).reduce_s(50_000_000, range(4)):.5f}"
            '0.01502'

        Args:
            num_bytes: the size of the tensor of each rank.
            ranks: the ranks that take part. The slowest link determines the time.

        """
        direct_s = self._direct_s(len(ranks) * num_bytes, ranks)
        return self._collective_s("reduce", direct_s, num_bytes, ranks)

    def _collective_s(self, kind: str, ring_s: float, num_bytes: float, ranks: Sequence[int]) -> float:
        """Return the measured time of a collective between these ranks; ``ring_s`` if it was not measured."""
        link: Link | None = getattr(self._collectives.get(frozenset(ranks)), kind, None)
        return ring_s if link is None else link.time_s(num_bytes)

    def _direct_s(self, num_bytes: float, ranks: Sequence[int]) -> float:
        """Return the time of one round in which a rank sends or receives (d - 1)/d of the bytes, for d ranks."""
        ring, count = self._ring(num_bytes, ranks), len(ranks)
        others = count - 1
        return max(min(others, 1) * link.latency_s + others * num_bytes / count * link.byte_s for link in ring)

    def _ring_s(self, num_bytes: float, ranks: Sequence[int]) -> float:
        """Return the time of d - 1 rounds in a ring of d ranks. In each round, every link carries 1/d of the bytes.

        A tree has fewer rounds, in which the slowest link of the ring carries as many bytes in all.
        """
        ring, count = self._ring(num_bytes, ranks), len(ranks)
        if self.algorithm == "tree":
            rounds = (count - 1).bit_length()
            sent = num_bytes * (count - 1) / count
            return rounds * max(link.latency_s for link in ring) + sent * max(link.byte_s for link in ring)
        slowest = max(link.latency_s + num_bytes * link.byte_s / count for link in ring)
        return (count - 1) * slowest

    def _ring(self, num_bytes: float, ranks: Sequence[int]) -> list[Link]:
        """Return the links of a ring. Raises ScheduleError for a size or for ranks that no collective can have."""
        check_number(num_bytes, "num_bytes")
        if len(set(ranks)) < len(ranks) or not ranks:
            raise ScheduleError(
                f"a collective must have at least one rank, and no rank twice; got {shown(ranks)}; correct the ranks"
            )
        return [self.link(one, other) for one, other in zip(ranks, [*ranks[1:], ranks[0]], strict=True)]

    @cached_property
    def _special(self) -> dict[tuple[int, int], Link]:
        return dict(self.special)

    @cached_property
    def _collectives(self) -> dict[frozenset[int], Collectives]:
        return {frozenset(one.ranks): one for one in self.collectives}

    def latencies(self, senders: Ints, receivers: Ints) -> NDArray[Any]:
        """Return the latency of each message, in seconds."""
        return self._figures(senders, receivers, lambda link: link.latency_s)

    def travel(self, senders: Ints, receivers: Ints, sizes: NDArray[Any]) -> NDArray[Any]:
        """Return the time for which each message occupies its link, in seconds."""
        travel: NDArray[Any] = sizes * self._figures(senders, receivers, lambda link: link.byte_s)
        return travel

    def _figures(self, senders: Ints, receivers: Ints, figure: Callable[[Link], float]) -> NDArray[Any]:
        """Return a property of each message's link, such as the latency. Calls ``figure`` once per pair of ranks."""
        num_ranks = 1 + int(max(senders.max(initial=0), receivers.max(initial=0)))
        pairs = senders * num_ranks + receivers
        figures: NDArray[Any] = np.zeros(num_ranks * num_ranks, object)
        used = np.zeros(len(figures), bool)
        used[pairs] = True
        for pair in np.flatnonzero(used).tolist():
            figures[pair] = figure(self.link(*divmod(pair, num_ranks)))
        return figures[pairs]  # type: ignore[no-any-return]

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain lists and numbers for JSON."""
        plain = asdict(self) | {
            "hosts": list(self.hosts),
            "special": [[sender, receiver, asdict(link)] for (sender, receiver), link in self.special],
            "collectives": [one.to_dict() for one in self.collectives],
        }
        unused = {"collectives": not self.collectives, "algorithm": self.algorithm == "ring"}
        return {name: value for name, value in plain.items() if not unused.get(name)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Links":
        """Make links from the dict that ``to_dict`` returned. Raises ScheduleError for invalid values."""

        def link(plain: Any) -> Link:
            try:
                return Link.from_dict(plain)
            except ScheduleError as error:
                raise ScheduleError(
                    f"links must have the fields inside, between, hosts, special and contended; {error}"
                ) from error

        def special(pairs: Any) -> tuple[Any, ...]:
            rows = [as_list(pair, _SPECIAL, _AS_TO_DICT) for pair in as_list(pairs, _SPECIAL, _AS_TO_DICT)]
            wrong = next((row for row in rows if len(row) != 3), None)
            if wrong is not None:
                raise ScheduleError(f"{_SPECIAL}; got {shown(wrong)}; {_AS_TO_DICT}")
            return tuple(((sender, receiver), link(own)) for sender, receiver, own in rows)

        def collectives(rows: Any) -> tuple[Any, ...]:
            return tuple(map(Collectives.from_dict, as_list(rows, _COLLECTIVES, _AS_TO_DICT)))

        if isinstance(values, Mapping):
            values = {"collectives": (), "algorithm": "ring", **values}  # older files have neither
        makes: dict[str, Any] = {"inside": link, "between": link, "special": special, "collectives": collectives}
        return read_fields(cls, values, "links must have", partly=False, **makes)


def slowest_of(links: Links, rows: Sequence[Sequence[int]]) -> Links:
    """Return the links between the ranks of one row: for each pair of places, the slowest link of any row.

    Args:
        links: the links between all ranks.
        rows: the ranks of each row. All rows have the same length.

    """
    own = list(dict.fromkeys(map(links.among, rows)))
    if len(own) == 1:
        return own[0]
    places = range(len(rows[0]))
    pairs = {(one, other): [each.link(one, other) for each in own] for one in places for other in places}
    special = tuple((pair, _slowest(every)) for pair, every in pairs.items() if pair[0] != pair[1])
    return Links(special=special, algorithm=links.algorithm)


def _slowest(links: Sequence[Link]) -> Link:
    """Return a link with the largest latency and the smallest bandwidth of these links."""
    speeds = [link.bytes_per_s for link in links if link.bytes_per_s is not None]
    return Link(max(link.latency_s for link in links), min(speeds, default=None))


_COLLECTIVES = "collectives must be a list of Collectives, one for each group of ranks"
_SPECIAL = "special must be a list of [from rank, to rank, link]"
_AS_TO_DICT = "write the links with to_dict"
