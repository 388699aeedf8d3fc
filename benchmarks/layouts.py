"""Layouts: which layout of a tensor group is fastest, and the speedups that the papers of 2-D and 3-D layouts measured.

    python benchmarks/layouts.py [--parts papers scaling grid]

All figures are simulated: a step is a forward and a backward of a transformer on one tensor group.

papers    speedups for each sequence on 64 GPUs, beside those of Xu et al. 2021 (Optimus, arXiv:2104.05343: 2-D over
          Megatron-LM's 1-D, 1.48) and Bian et al. 2021 (arXiv:2105.14450: 3-D over 1-D, 2.32, and over 2-D, 1.57)
scaling   the time of a sequence on 4 to 64 GPUs, where the model grows with the GPUs (weak) and where it does not
grid      the fastest layout of one pair of linear layers h -> 4h -> h, for several numbers of rows M and widths h

What is known of the papers' runs:

- Optimus' published benchmark (github.com/xuqifan897/Optimus) has 24 layers without embedding and head, sequences of
  512 tokens, heads of 64, float32, recomputation of each layer, no optimizer, nodes of four GPUs in blocks of 2 x 2,
  and for 4 GPUs the width 2,048 and 96 sequences. With the same weights for each GPU, 64 GPUs have the width 8,192;
  with the same number of sequences for each row of GPUs, they have 384.
- Frontera's nodes have four Quadro RTX 5000 of 16 GB (TACC's user guide), with 11.2 TFLOP/s in float32 (Cornell).
- Bian et al. used 64 V100 of TACC. A V100 has 15.7 TFLOP/s in float32 and 900 GB/s. Their step time is that of a
  forward and a backward, divided by the batch, and batches differ between layouts.

What was not found: the widths and batches of Bian et al., the batch of Megatron-LM in Optimus' comparison, and the
network of the GPU nodes. The table has several values for each of them. "largest" is the largest batch that fits into
16 GB, for each layout.

Kernels reach 60 % of the peak of products and 80 % of the memory bandwidth. Attention stores its scores. A group's
collectives are those of NCCL: rings, and pipelined rings for broadcasts and sums on one rank. The groups along an axis
that leave a node at the same time share its network card: so do four rings along the rows of a 3-D layout, while the
ring of a 1-D layout has the card for itself. In the grid, each GPU has a network card, and a sum is received in one
round, as pipesched does it.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipesched import Link, Links, Profile, schedules
from pipesched.simulation.links import Collectives
from pipesched.simulation.memory import rank_memory
from pipesched.simulation.simulator import step_time
from pipesched.simulation.tensor_axis import TensorAxis
from pipesched.simulation.tensor_costs import TensorCosts
from pipesched.simulation.tensor_layout import TensorLayout

TOKENS, HEAD, LAYERS = 512, 64, 24
NODE = 4  # GPUs
BATCHES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)


@dataclass(frozen=True)
class Gpu:
    """A GPU in a node of four: its rates, the size of an element, its memory, and the links."""

    name: str
    flops_per_s: float
    bytes_per_s: float
    inside: Link  # to a GPU of the same node
    wide: int = 4
    memory_bytes: float = 16e9


RTX = Gpu("RTX 5000", 0.6 * 11.2e12, 0.8 * 448e9, Link(10e-6, 10e9))
V100 = Gpu("V100", 0.6 * 15.7e12, 0.8 * 900e9, Link(5e-6, 60e9))
V100_HALF = Gpu("V100, fp16", 0.6 * 125e12, 0.8 * 900e9, Link(5e-6, 60e9), wide=2)
CARDS = {"56 Gb/s": 7e9, "100 Gb/s": 12.5e9}
FAR_S = 10e-6  # the latency to another node


@dataclass(frozen=True)
class Transformer:
    """Transformer layers, and the sequences of a step."""

    width: int
    batch: int
    gpu: Gpu
    layers: int = LAYERS

    @property
    def profile(self) -> Profile:
        """Return the costs of the layers on one GPU."""
        rows, width, gpu = self.batch * TOKENS, self.width, self.gpu
        given = rows * width * gpu.wide
        weights = 12 * width**2 * gpu.wide
        products_s = (24 * rows * width**2 + 4 * rows * TOKENS * width) / gpu.flops_per_s
        # Norms, dropouts and residual sums, which a 1-D layout does not divide; then GELU, and the scores of attention.
        whole_s = 8 * given / gpu.bytes_per_s
        divided_s = (8 + 4 * TOKENS / HEAD) * given / gpu.bytes_per_s
        forward_s = products_s + whole_s + divided_s
        held = 17 + 2.5 * TOKENS / HEAD  # tensors of the size of the input, of which a 1-D layout does not divide 5
        layer = {
            "forward_s": forward_s,
            "backward_s": 2 * forward_s,
            "weight_grad_s": products_s,
            "parameter_bytes": weights,
            "num_parameters": 12 * width**2,
            "optimizer_bytes": 0,
            "output_bytes": given,
            "activation_bytes": round(held * given),
            "split_forward": 1 - whole_s / forward_s,
            "split_weight_grad": 1,
            "split_parameters": 1,
            "split_activations": 1 - 5 / held,
            "all_reduce_forward_bytes": 2 * given,
            "all_reduces_forward": 2,
            "first_input_bytes": 2 * given,
            "first_output_bytes": (3 + 4) * given,
            "second_input_bytes": (1 + 4) * given,
            "second_output_bytes": 2 * given,
            "first_products": 2,
            "second_products": 2,
            "product_weight_bytes": weights,
            "norms": 2,
            "norm_row_bytes": 2 * rows * 4,
            "summed_weights": 4 + 2,  # biases, and norms with a weight and a bias
            "summed_weight_bytes": (3 + 1 + 4 + 1 + 4) * width * gpu.wide,
        }
        return Profile.from_table([{"name": f"layer{at}"} | layer for at in range(self.layers)], rows=self.batch)


def simulated(profile: Profile, layout: TensorLayout, links: Links) -> tuple[float, int]:
    """Return the time of a step in which each layer is recomputed, and the peak memory of a GPU."""
    axis = TensorAxis(size=layout.size, layout=layout)
    own = TensorCosts(axis, layout.size, links).divided(profile)
    (rows,) = own.graphs
    costs = own.costs([own.layers], rows, keep=dict.fromkeys(own.layers, "recompute"))
    program = schedules.get("1f1b").program(1, 1)
    return step_time(program, costs), rank_memory(program, costs)[0].total_bytes


# ---- the papers' nodes ----------------------------------------------------------------------------------------------


def nodes_of(layout: TensorLayout, *, square: bool) -> list[int]:
    """Return the node of each GPU: four consecutive ranks or, in 2-D, blocks of 2 x 2."""
    if not square or layout.kind != "2d":
        return [rank // NODE for rank in range(layout.size)]
    side = layout.shape[0]
    places = (divmod(rank, side) for rank in range(layout.size))
    return [row // 2 * side + column // 2 for row, column in places]


def node_links(layout: TensorLayout, gpu: Gpu, card: float, *, square: bool = True) -> Links:
    """Return the links of the groups along each axis. Groups that leave a node at the same time share its card."""
    nodes = nodes_of(layout, square=square)
    collectives: dict[tuple[int, ...], Collectives] = {}
    for axes in dict.fromkeys([*((axis,) for axis in layout.axes), layout.outer.rows or layout.axes]):
        groups = list(dict.fromkeys(tuple(layout.peers(rank, axes)) for rank in range(layout.size)))
        leaving = Counter(node for ranks in groups if len(spans(ranks, nodes)) > 1 for node in spans(ranks, nodes))
        for ranks in groups:
            own = spans(ranks, nodes)
            far = len(own) > 1
            speed = min(gpu.inside.bytes_per_s or card, card / max(leaving[node] for node in own) if far else 1e30)
            collectives[ranks] = _rings(ranks, Link(FAR_S if far else gpu.inside.latency_s, speed))
    return Links(inside=gpu.inside, collectives=tuple(collectives.values()))


def spans(ranks: Sequence[int], nodes: Sequence[int]) -> set[int]:
    """Return the nodes that have some of these ranks."""
    return {nodes[rank] for rank in ranks}


def _rings(ranks: tuple[int, ...], link: Link) -> Collectives:
    """Return NCCL's collectives in a ring of equal links."""
    others = len(ranks) - 1
    assert link.bytes_per_s is not None
    once = Link(others * link.latency_s, link.bytes_per_s)
    part = Link(others * link.latency_s, link.bytes_per_s * len(ranks) / others)
    twice = Link(2 * part.latency_s, link.bytes_per_s * len(ranks) / (2 * others))
    return Collectives(ranks, all_reduce=twice, reduce_scatter=part, all_gather=part, broadcast=once, reduce=once)


def sequence_s(
    layout: TensorLayout, width: int, batch: int | None, gpu: Gpu, card: float, *, square: bool = True
) -> tuple[float, int]:
    """Return the time for a sequence, and the batch: for None, the largest that fits into memory."""
    links = node_links(layout, gpu, card, square=square)
    for size in (batch,) if batch is not None else reversed(BATCHES):
        step_s, peak_bytes = simulated(Transformer(width, size, gpu).profile, layout, links)
        if batch is not None or peak_bytes <= gpu.memory_bytes:
            return step_s / size, size
    return float("inf"), 0


def papers() -> Iterator[str]:
    """Yield the lines of the table of speedups on 64 GPUs."""
    flat, square, cube = (TensorLayout.of(kind, 64) for kind in ("1d", "2d", "3d"))
    yield "| GPU | network card | width | batches 1-D, 2-D, 3-D | 2-D / 1-D | 3-D / 1-D | 3-D / 2-D |"
    yield f"|{'---|' * 7}"
    for gpu, widths in ((RTX, (8192,)), (V100, (2048, 4096, 8192)), (V100_HALF, (2048, 4096, 8192))):
        for card, speed in CARDS.items():
            for width in widths:
                for batch in (64, 384, None):
                    one, two, three = (
                        sequence_s(layout, width, batch, gpu, speed, square=gpu is RTX)
                        for layout in (flat, square, cube)
                    )
                    sizes = f"{one[1]}, {two[1]}, {three[1]}" + ("" if batch else " (largest)")
                    ratios = (one[0] / two[0], one[0] / three[0], two[0] / three[0])
                    yield f"| {gpu.name} | {card} | {width} | {sizes} | {' | '.join(f'{own:.2f}' for own in ratios)} |"
    yield "| published: RTX 5000, Xu et al. |  |  |  | 1.48 |  |  |"
    yield "| published: V100, Bian et al. |  |  |  |  | 2.32 | 1.57 |"


def scaling() -> Iterator[str]:
    """Yield the lines of the table with the time of a sequence for several numbers of GPUs."""
    yield "| setting | GPUs | width | batch | 1-D | 2-D | 2.5-D | 3-D |"
    yield f"|{'---|' * 8}"
    for name in ("weak", "strong"):
        for count, side in ((4, 2), (8, 3), (16, 4), (36, 6), (64, 8)):
            width, batch = (1024 * side, 48 * side) if name == "weak" else (3072, 96)
            known = {layout.kind: layout for layout in TensorLayout.every(count)}
            cells = [
                f"{sequence_s(known[kind], width, batch, RTX, CARDS['100 Gb/s'])[0] * 1e3:.0f} ms"
                if kind in known
                else ""
                for kind in ("1d", "2d", "2.5d", "3d")
            ]
            yield f"| {name} | {count} | {width} | {batch} | {' | '.join(cells)} |"


# ---- which layout for which shape -----------------------------------------------------------------------------------

#: Groups of GPUs with 60 % of 989 TFLOP/s: name, number, links.
MACHINES = (
    ("64 GPUs, equal links of 25 GB/s", 64, Links(inside=Link(10e-6, 25e9))),
    ("64 GPUs, 8 in a host", 64, Links.of_hosts(8, 64, inside=Link(5e-6, 300e9), between=Link(10e-6, 50e9))),
    ("16 GPUs, 8 in a host", 16, Links.of_hosts(8, 16, inside=Link(5e-6, 300e9), between=Link(10e-6, 50e9))),
    ("8 GPUs of a host", 8, Links(inside=Link(5e-6, 300e9))),
)


def pair(rows: int, width: int) -> Profile:
    """Return the costs of h -> 4h -> h in bfloat16."""
    forward_s = 16 * rows * width**2 / (0.6 * 989e12)
    given = 2 * rows * width
    layer = {
        "forward_s": forward_s,
        "backward_s": 2 * forward_s,
        "parameter_bytes": 16 * width**2,
        "output_bytes": given,
        "activation_bytes": 5 * given,
        "split_forward": 1,
        "split_activations": 1,
        "all_reduce_forward_bytes": given,
        "first_input_bytes": given,
        "first_output_bytes": 4 * given,
        "second_input_bytes": 4 * given,
        "second_output_bytes": given,
    }
    return Profile.from_table([{"name": "pair"} | layer], rows=rows)


def grid() -> Iterator[str]:
    """Yield tables with the fastest layout, and how many times as fast as 1-D it is, for rows and widths."""
    widths = (1024, 2048, 4096, 8192, 16384)
    for name, count, links in MACHINES:
        yield f"| {name}: M | {' | '.join(f'h = {width}' for width in widths)} |"
        yield f"|{'---|' * (len(widths) + 1)}"
        for rows in (512, 2048, 8192, 32768, 131072, 524288):
            cells = []
            for width in widths:
                times = {layout: kept_s(pair(rows, width), layout, links) for layout in TensorLayout.every(count)}
                best = min(times, key=times.__getitem__)
                gain = times[TensorLayout.of("1d", count)] / times[best]
                cells.append(best.kind + (f", {gain:.2f}x" if best.kind != "1d" else ""))
            yield f"| {rows} | {' | '.join(cells)} |"
        yield ""


def kept_s(profile: Profile, layout: TensorLayout, links: Links) -> float:
    """Return the time of a step without recomputation."""
    own = TensorCosts(TensorAxis(size=layout.size, layout=layout), layout.size, links).divided(profile)
    (rows,) = own.graphs
    return step_time(schedules.get("1f1b").program(1, 1), own.costs([own.layers], rows))


PARTS = {"papers": papers, "scaling": scaling, "grid": grid}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    for part in parser.parse_args().parts:
        print(f"{part}\n")
        print(*PARTS[part](), sep="\n", flush=True)
        print()


if __name__ == "__main__":
    main()
