"""Layout traffic: the time and the bytes of a tensor group's collectives in a layout of two or three dimensions.

The ranks exchange blocks of X, W and Y along the axes of the layout (`pipesched.simulation.tensor_layout`). The ranks
that differ only along an axis have links of their own: along the last axis, they have consecutive numbers, so they
often share a host. The slowest of these groups determines the time.

Sources: Xu et al. 2021, arXiv:2104.05343 (2d); Wang et al. 2021, arXiv:2105.14500 (2.5d); Bian et al. 2021,
arXiv:2105.14450 (3d).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

from pipesched.simulation.links import Links
from pipesched.simulation.tensor_layout import LayerExchange, TensorLayout
from pipesched.simulation.tensor_split import TensorShares, TensorTraffic

__all__ = ["LayoutTraffic"]

#: The methods with the times of the kinds of a `LayerExchange`, as tensor groups run them.
_TIMES: dict[str, Callable[[Links, float, Sequence[int]], float]] = {
    "all-reduce": partial(Links.all_reduce_s, direct=True),
    "all-gather": Links.all_gather_s,
    "reduce-scatter": partial(Links.reduce_scatter_s, direct=True),
    "broadcast": Links.broadcast_s,
    "reduce": Links.reduce_s,
}


class LayoutTraffic:
    """Computes the collectives of split layers: of products, norms, biases and embeddings.

    ::

        traffic = LayoutTraffic(TensorLayout.of("3d", 64), [Links(inside=Link(5e-6, 25e9))])
        print(traffic.of(TensorShares(first_products=1, first_input_bytes=10**9, product_weight_bytes=10**8)))

    Args:
        layout: how the ranks of a group divide matrices.
        groups: the links inside each tensor group, whose ranks are numbered from 0.

    """

    def __init__(self, layout: TensorLayout, groups: Sequence[Links]) -> None:
        self._layout = layout
        self._groups = groups
        self._seconds = cache(self._slowest_s)
        self._lines = cache(self._links_along)

    def of(self, shares: TensorShares) -> TensorTraffic:
        """Return the collectives of a layer for one micro-batch.

        The time and the bytes of an exchange are linear in its size, so those of the mean product, times the number of
        products, are exact.
        """
        seconds = dict.fromkeys("FIW", 0.0)
        received = dict.fromkeys("FIW", 0.0)
        for action, count, exchange in (*self._products(shares), *self._others(shares)):
            seconds[action] += count * exchange.times * self._seconds(exchange.kind, exchange.axes, exchange.elements)
            received[action] += count * exchange.received
        return TensorTraffic(
            forward_s=seconds["F"],
            input_grad_s=seconds["I"],
            weight_grad_s=seconds["W"],
            forward_bytes=round(received["F"]),
            input_grad_bytes=round(received["I"]),
            weight_grad_bytes=round(received["W"]),
        )

    def seconds(self, kind: str, axes: tuple[str, ...], num_bytes: float) -> float:
        """Return the time of a collective of the ranks that differ only along these axes.

        Args:
            kind: that of a `LayerExchange`.
            axes: axes of the layout.
            num_bytes: the size of the whole tensor.

        """
        return self._seconds(kind, axes, num_bytes)

    @property
    def num_weights(self) -> int:
        """The number of ranks among which the weights of products are divided."""
        weight = self._layout.linear(second=False).weight
        return self._layout.length((*weight.rows, *weight.columns))

    @property
    def num_held(self) -> int:
        """The number of blocks of a matrix that a rank holds while it multiplies: its own, and those it receives."""
        blocks = self._layout.linear(second=False)
        if blocks.panels:
            return 2
        return 1 if blocks.gathered_weight is None else self._layout.length([blocks.gathered_weight])

    def weight_bytes(self, shares: TensorShares) -> float:
        """Return the size of the blocks of the weights of all products of a layer on one rank."""
        return shares.product_weight_bytes / self.num_weights

    def _products(self, shares: TensorShares) -> Iterator[tuple[str, int, LayerExchange]]:
        """Yield the action, the number of products and the exchange, in bytes, for the mean first and second product.

        W is exchanged along the same axis in both, so all products may have the mean weight.
        """
        for second, count, x, y in (
            (False, shares.first_products, shares.first_input_bytes, shares.first_output_bytes),
            (True, shares.second_products, shares.second_input_bytes, shares.second_output_bytes),
        ):
            if count:
                weight = shares.product_weight_bytes / shares.num_products
                for action, found in self._layout.exchanges_of(x / count, weight, y / count, second=second).items():
                    yield from ((action, count, exchange) for exchange in found)

    def _others(self, shares: TensorShares) -> Iterator[tuple[str, int, LayerExchange]]:
        """Yield the exchanges of norms, weights that all rows use, and embeddings.

        A norm gathers two numbers for each row over the ranks that divide the columns, and sums two in its backward.
        The ranks that divide the rows sum the gradients of biases and of norms' weights. They also divide the
        vocabulary of an embedding, so they add and scatter its output.
        """
        rows, columns = self._layout.outer.rows, self._layout.outer.columns
        height, width = self._layout.length(rows), self._layout.length(columns)
        if shares.norms:
            own = 2 * shares.norm_row_bytes / shares.norms / height
            yield "F", shares.norms, self._exchange("all-gather", columns, own * width)
            yield "I", shares.norms, self._exchange("all-reduce", columns, own)
        if shares.summed_weights:
            own = shares.summed_weight_bytes / shares.summed_weights / width
            yield "I", shares.summed_weights, self._exchange("all-reduce", rows, own)
        if shares.embedding_output_bytes:
            own = shares.embedding_output_bytes / width
            yield "F", 1, self._exchange("reduce-scatter", rows, own)
            yield "I", 1, self._exchange("all-gather", rows, own)

    def _exchange(self, kind: str, axes: tuple[str, ...], num_bytes: float) -> LayerExchange:
        return LayerExchange(kind=kind, axes=axes, ranks=self._layout.length(axes), elements=num_bytes)

    def _slowest_s(self, kind: str, axes: tuple[str, ...], num_bytes: float) -> float:
        ranks = range(self._layout.length(axes))
        return max((_TIMES[kind](links, num_bytes, ranks) for links in self._lines(axes)), default=0.0)

    def _links_along(self, axes: tuple[str, ...]) -> list[Links]:
        """Return the links between the ranks that differ only along these axes, without repetitions."""
        lines: list[list[int]] = []
        left = dict.fromkeys(range(self._layout.size))
        while left:
            lines.append(self._layout.peers(next(iter(left)), axes))
            for rank in lines[-1]:
                del left[rank]
        return list(dict.fromkeys(links.among(line) for links in self._groups for line in lines))
