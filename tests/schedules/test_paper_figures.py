"""Numbers that papers print, and one table of every schedule at unit costs. Letters as in closed_forms.py."""

from fractions import Fraction

import pytest

from pipesched import Costs, schedules, simulate
from tests.support.closed_forms import built, timed


@pytest.mark.parametrize(
    ("name", "v", "makespan", "peaks"),
    [
        ("gpipe", 1, 33, [8, 8, 8, 8]),
        ("1f1b", 1, 33, [4, 3, 2, 1]),
        ("eager-1f1b", 1, 33, [7, 5, 3, 1]),
        ("interleaved-1f1b", 2, 28.5, [5.5, 4.5, 3.5, 2.5]),
        ("interleaved-1f1b", 4, 26.25, [4.75, 4.25, 3.75, 3.25]),
        ("zb-h1", 1, 27, [4, 4, 4, 4]),
        ("looped-bfs", 2, 28.5, [8, 8, 8, 8]),
        ("zb-h2", 1, 27, [7, 7, 7, 7]),
        ("gis", 2, 27, [4, 3.5, 3, 2.5]),
        ("interleaved-zb", 2, 25.5, [4, 4, 4, 4]),
        ("zb-v", 2, 25.5, [4, 4, 4, 4]),
    ],
)
def test_four_ranks_eight_microbatches_with_unit_costs(name, v, makespan, peaks):
    """Peaks in activations of one micro-batch on one rank: a chunk holds one v-th of it."""
    trace = timed(name, 4, 8, F=1, I=1, W=1, v=v)
    assert trace.makespan_s == makespan
    assert trace.span_s == {"zb-h2": 24, "zb-v": 24}.get(name, makespan)  # each rank counted from its own start
    assert [Fraction(peak, v) for peak in trace.peak_in_flight] == peaks


@pytest.mark.parametrize(("name", "peaks"), [("1f1b", (4, 3, 2, 1)), ("gpipe", (8, 8, 8, 8))])
def test_four_ranks_eight_microbatches_where_a_backward_takes_as_long_as_a_forward(name, peaks):
    trace = timed(name, 4, 8, F=1, I=1, W=0)
    assert (trace.makespan_s, trace.bubble_ratio, trace.peak_in_flight) == (22, Fraction(3, 11), peaks)


# Times in ms and bubble rates: tables of the profiled times and of the bubble rates in arXiv:2401.10241, 8 ranks.
ZERO_BUBBLE = [
    # model, m, F, I, W, c, 1F1B, 1F1B-I, ZB-H1, ZB-H2
    ("1.5B", 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1055, 0.1585, 0.1083),
    ("1.5B", 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.0818, 0.1242, 0.0837),
    ("1.5B", 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0443, 0.0674, 0.0444),
    ("6.2B", 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.0808, 0.1323, 0.0698),
    ("6.2B", 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.0628, 0.1045, 0.0559),
    ("6.2B", 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0320, 0.0554, 0.0294),
]
CHUNKS = {"1.5B": 3, "6.2B": 4}  # 22 and 30 layers, and one each for the embedding and the head, on 8 ranks


@pytest.mark.parametrize("row", ZERO_BUBBLE)
def test_bubble_rates_of_the_zero_bubble_paper(row):
    _, m, F, I, W, c, one_f_one_b, _, zb_h1, zb_h2 = row  # noqa: E741
    costs = Costs.uniform(8, forward_s=F, input_grad_s=I, weight_grad_s=W, transfer_s=c)
    for name, rate in {"1f1b": one_f_one_b, "zb-h1": zb_h1, "zb-h2": zb_h2}.items():
        trace = simulate(schedules.get(name).program(8, m), costs)
        assert round(1 - m * (F + I + W) / trace.span_s, 4) == rate


@pytest.mark.parametrize("row", ZERO_BUBBLE)
def test_the_zero_bubble_paper_counts_less_latency_for_interleaving(row):
    """The first micro-batch alone crosses ranks 2(pv - 1) times; the paper's rates fit p latencies fewer."""
    model, m, F, I, W, c, _, interleaved, *_ = row  # noqa: E741
    p, v, T = 8, CHUNKS[model], F + I + W
    costs = Costs.uniform(p * v, forward_s=F / v, input_grad_s=I / v, weight_grad_s=W / v, transfer_s=c)
    trace = simulate(built("interleaved-1f1b", p, m, v=v), costs)
    without_latency = m * T + (p - 1) * T / v
    assert trace.span_s == pytest.approx(without_latency + 2 * (p * v - 1) * c)
    assert 0 < 1 - m * T / trace.span_s - interleaved < 0.0036
    assert round(1 - m * T / (without_latency + (p * (2 * v - 1) - 2) * c), 4) == interleaved


@pytest.mark.parametrize(("p", "throughput"), [(2, 1.8), (4, 3.4), (8, 6.3)])
def test_the_throughput_of_gpipe_with_32_microbatches(p, throughput):
    """Transformer in table 2 of arXiv:1811.06965, relative to 2 ranks with 1 micro-batch; measured, so up to 8 % less.

    The table's other rows change the batch size or have uneven stages.
    """

    def speed(p, m):
        return p * m / timed("gpipe", p, m, F=1, I=1, W=1).makespan_s

    predicted = speed(p, 32) / speed(2, 1)
    assert predicted == pytest.approx(p * 32 / (32 + p - 1))
    assert 0.92 * predicted <= throughput <= predicted


@pytest.mark.parametrize(("p", "m", "v"), [(8, 64, 1), (8, 64, 2), (4, 16, 4)])
def test_the_bubble_over_the_ideal_time_as_megatron_counts_it(p, m, v):
    """(p - 1) / m, and (p - 1) / (vm) interleaved; arXiv:2104.04473."""
    trace = timed("interleaved-1f1b" if v > 1 else "1f1b", p, m, F=1, I=1, W=1, v=v)
    assert (trace.makespan_s - 3 * m) / (3 * m) == Fraction(p - 1, v * m)
