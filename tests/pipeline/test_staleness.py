"""PipeDream's staleness, to the bit: against the papers' formulas, and against replays."""

from collections.abc import Callable

import pytest
import torch

from tests.support.async_replay import (
    KINDS,
    LR,
    VERTICAL,
    Replay,
    ScaledLoss,
    adam,
    batch,
    data,
    f_grads,
    factors,
    pipeline,
    rule_of,
    sgd,
    trained,
    transformer,
)
from tests.support.models import assert_equal_bits


@pytest.mark.one_in(4)
@pytest.mark.parametrize("vertical", [False, True])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_pipedream_is_as_stale_as_its_paper_says(p: int, vertical: bool) -> None:
    """w(t+1) = w(t) - lr grad f(w_1(t-p+1), w_2(t-p+2), ..., w_p(t)); with vertical sync all at t-p+1."""
    for m in range(1, 10):
        steps = 3 if m > 3 else 6
        w = [[weight] for weight in (layer.weight.detach() for layer in factors(p))]
        pairs = [(x, y) for step in range(steps) for x, y in zip(*data(m, step), strict=True)]
        for t, (x, y) in enumerate(pairs):
            used = [max(0, t - p + 1 + (0 if vertical else stage)) for stage in range(p)]
            grads = f_grads([w[stage][used[stage]] for stage in range(p)], x, y)
            for stage, grad in enumerate(grads):
                w[stage].append(torch.add(w[stage][t], grad, alpha=-LR))
        actual = trained(VERTICAL if vertical else "pipedream", p, m, steps)
        assert actual == [versions[-1] for versions in w], m


@pytest.mark.one_in(2)
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_2bw_is_one_update_behind(p: int) -> None:
    """W(t+1) = W(t) - lr grad f(W(t-1)), f the mean over the step; fewer than p - 1 micro-batches: further behind."""
    for m in range(1, 10):
        behind = 1 if m >= p - 1 else -(-(p - 1) // m)
        w = [[layer.weight.detach() for layer in factors(p)]]
        for t in range(6):
            x, y = data(m, t)
            used = w[max(0, t - behind)]
            grads = f_grads(used, x[0], y[0], 1 / m)
            for one, other in zip(x[1:], y[1:], strict=True):
                grads = [a + b for a, b in zip(grads, f_grads(used, one, other, 1 / m), strict=True)]
            w.append([torch.add(a, grad, alpha=-LR) for a, grad in zip(w[t], grads, strict=True)])
        assert trained("pipedream-2bw", p, m, 6) == w[-1], m


@pytest.mark.one_in(18)
@pytest.mark.parametrize(
    ("optimizer", "checkpoint"), [(sgd, "never"), (adam, "never"), (sgd, "always"), (adam, "except_last")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_after_20_steps_the_weights_are_those_of_a_replay(kind: str, optimizer: Callable, checkpoint: str) -> None:
    m = 3
    expected, actual, losses = transformer(), transformer(), [ScaledLoss(), ScaledLoss()]
    replay = Replay(expected, losses[0], optimizer, m, rule_of(kind, 3, m))
    with pipeline(actual, KINDS[kind], m, loss_fn=losses[1], optimizer=optimizer, checkpoint=checkpoint) as pipe:
        for step in range(20):
            x, y = batch(step)
            pipe.step(x, target=y)
            replay.step(step, x, y, kind != "pipedream-2bw")
        last = pipe.flush()
    assert all(value.isfinite().all() for value in actual.state_dict().values())
    assert_equal_bits(actual.state_dict(), expected.state_dict())
    assert_equal_bits(losses[1].state_dict(), losses[0].state_dict())
    assert torch.equal(actual[2].bias, transformer()[2].bias)
    rows = [3, 2, 2]
    mean = sum(loss * n for loss, n in zip(replay.losses[-m:], rows, strict=True)) / sum(rows)
    torch.testing.assert_close(last, mean)
    assert all(parameter.grad is None for parameter in actual.parameters())


def test_a_step_returns_the_loss_of_the_one_before_and_flush_the_last() -> None:
    """The loss is the mean over the rows of the step, also where each micro-batch is an update of its own."""
    m = 3
    replay = Replay(transformer(), ScaledLoss(), sgd, m, rule_of("pipedream", 3, m))
    wanted = []
    for step in range(4):
        replay.step(step, *batch(step), True)
        wanted.append(sum(loss * rows for loss, rows in zip(replay.losses[-m:], (3, 2, 2), strict=True)) / 7)
    with pipeline(transformer(), "pipedream", m, loss_fn=ScaledLoss()) as pipe:
        got = [pipe.step(batch(step)[0], target=batch(step)[1]) for step in range(4)]
        got.append(pipe.flush())
        assert pipe.flush() is None
    torch.testing.assert_close(torch.stack(got), torch.stack([wanted[0], *wanted]))
