"""The counter of a grid shows the elements and rounds of the formulas, exactly: in a run, and in a counting run."""

from collections import Counter

import pytest
import torch
from torch import nn

from pipesched.parallel.axis_groups import AxisGroups
from pipesched.parallel.styles import split_model
from pipesched.parallel.tensor_group import TensorGroup
from pipesched.simulation.tensor_layout import TensorLayout
from tests.support.divided_layers import grouped

GRIDS = [("2d", 4), ("2.5d", 8), ("3d", 8), ("2d", 9)]
LARGE = [("3d", 27), ("2d", 64), ("2.5d", 64), ("3d", 64)]
BYTES = 8  # of a float64
#: The elements in millions that a rank receives in the forward and in a whole step of h -> 4h -> h, as in the papers.
PUBLISHED = {
    (16384, 4096): {"1d": (132.1, 264), "2d": (51.4, 154), "2.5d": (40.9, 135), "3d": (37.7, 113)},
    (512, 16384): {"1d": (16.5, 33), "2d": (239.5, 718), "2.5d": (404.6, 1415), "3d": (104.6, 314)},
}


def pair(width, hidden, **options):
    return nn.Sequential(nn.Linear(width, hidden, bias=False, **options), nn.Linear(hidden, width, False, **options))


def traffic(group, layout, rows, width, hidden, device="cpu"):
    """The traffic of a forward and a backward of a pair of linear layers, by (action, collective)."""
    if layout.kind != "1d":
        AxisGroups(group, layout)
    model = pair(width, hidden, dtype=torch.float64, device=device)
    split_model(model, {"0": "column", "1": "row"}, group)
    outer = layout.outer
    shape = rows // layout.length(outer.rows), width // layout.length(outer.columns)
    x = torch.ones(shape, dtype=torch.float64, device=device, requires_grad=True)
    with group.counter.during("F"):
        output = model(x)
    with group.counter.during("B"):
        output.sum().backward()
    return {place: (own.received_bytes, own.rounds) for place, own in group.counter.traffic.items()}


def in_processes(process_group, kind, size, *sizes):
    return traffic(grouped(process_group, size), TensorLayout.of(kind, size), *sizes)


def formulas(layout, rows, width, hidden):
    received, rounds = Counter(), Counter()
    for sizes, second in (((rows, width, hidden), False), ((rows, hidden, width), True)):
        for action, exchanges in layout.exchanges(*sizes, second=second).items():
            for exchange in exchanges:
                axes = "" if layout.kind == "1d" else f" {' x '.join(exchange.axes)}"
                place = ("F" if action == "F" else "B", f"{exchange.kind}{axes}")
                received[place] += exchange.received * BYTES
                rounds[place] += exchange.rounds
    return {place: (count, rounds[place]) for place, count in received.items()}


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_ranks_receive_what_the_formulas_state(ranks_of, grid):
    kind, size = grid
    sizes = 36, 72, 144
    due = formulas(TensorLayout.of(kind, size), *sizes)
    assert ranks_of[size].run(size, in_processes, kind, size, *sizes) == [due] * size
    assert counted(kind, size, sizes) == [due] * size


@pytest.mark.parametrize("grid", LARGE, ids=str)
def test_a_counting_run_of_many_ranks_receives_what_the_formulas_state(grid):
    kind, size = grid
    sizes = (324, 162, 324) if size == 27 else (512, 128, 512)
    assert counted(kind, size, sizes) == [formulas(TensorLayout.of(kind, size), *sizes)] * size


def counted(kind, size, sizes):
    """Run each rank in turn on meta tensors, with collectives that only count."""
    layout = TensorLayout.of(kind, size)
    return [traffic(TensorGroup.counting(size, rank), layout, *sizes, device="meta") for rank in range(size)]


@pytest.mark.parametrize("sizes", PUBLISHED)
@pytest.mark.parametrize("kind", ["1d", "2d", "2.5d", "3d"])
def test_64_ranks_receive_as_many_elements_as_published(sizes, kind):
    rows, width = sizes
    layout = TensorLayout.of(kind, 64)
    found = traffic(TensorGroup.counting(64), layout, rows, width, 4 * width, device="meta")
    forward = sum(count for (action, _), (count, _) in found.items() if action == "F") / BYTES / 1e6
    step = sum(count for count, _ in found.values()) / BYTES / 1e6
    assert (round(forward, 1), round(step)) == PUBLISHED[sizes][kind]


def test_a_norm_and_a_bias_receive_what_the_page_states(ranks_of):
    for found in ranks_of[4].run(4, of_norm):
        assert found == {("F", "all-gather column"): (2 * 6 * 8, 1), ("B", "all-reduce column"): (4 * 6 * 4, 2)}


def of_norm(process_group):
    group = grouped(process_group, 4)
    AxisGroups(group, TensorLayout.of("2d", 4))
    model = nn.Sequential(nn.LayerNorm(8, elementwise_affine=False, dtype=torch.float64))
    split_model(model, {"0": "norm"}, group)
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    with group.counter.during("F"):
        output = model(x)
    with group.counter.during("B"):
        output.square().sum().backward()
    return {place: (own.received_bytes, own.rounds) for place, own in group.counter.traffic.items()}
