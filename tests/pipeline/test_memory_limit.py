"""What a search says fits is what the pipeline says that it needs: both are told by `pipesched.simulation.memory`."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from pipesched import Pipeline, Search, profile, tune
from pipesched.errors import MemoryLimitError

OPTIMIZERS = [
    None,
    partial(torch.optim.SGD, lr=0.1),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    partial(torch.optim.Adam, lr=0.1),
    partial(torch.optim.Adam, lr=0.1, foreach=True),
]


@settings(max_examples=3, suppress_health_check=[HealthCheck.too_slow])
@given(
    schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    widths=st.lists(st.sampled_from([4, 16, 40]), min_size=4, max_size=6),
    rows=st.sampled_from([2, 30]),
    share=st.floats(0.6, 1.2),
    optimizer=st.sampled_from(OPTIMIZERS),
)
def test_a_plan_that_was_searched_under_a_limit_keeps_it(schedule, widths, rows, share, optimizer):
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.Tanh())]
    model, sample = nn.Sequential(*layers), torch.rand(rows, widths[0])
    choices = {"loss_fn": functional.mse_loss, "num_microbatches": 4, "optimizer": optimizer}
    choices |= {"schedule": schedule, "devices": ["cpu"] * 2}
    with Pipeline(model, sample, boundaries=[2], **choices) as pipe:
        limit = int(share * max(own.total_bytes for own in pipe.predicted_memory))
    try:
        pipe = Pipeline(model, sample, search=Search(memory_limit_bytes=limit), **choices)
    except MemoryLimitError:
        assume(False)
    with pipe:
        assert max(own.total_bytes for own in pipe.predicted_memory) <= limit


def test_a_limit_of_processes_counts_the_receives_that_are_posted():
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
    known = profile(model, torch.rand(16, 32), rows=[16])

    def least(**options):
        plan = tune(known, num_ranks=2, batch_size=64, schedule="1f1b", num_microbatches=4, all_ranks=True, **options)
        return plan.alternatives[0].peak_bytes

    assert least(ranks_are="processes") - least() >= 2 * 16 * 32 * 4


def test_a_memory_limit_below_the_peak_of_an_update_is_refused():
    model, sample = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), torch.rand(2, 64)
    adam = partial(torch.optim.Adam, lr=0.1, foreach=True)
    choices = {"devices": ["cpu"] * 2, "num_microbatches": 2, "optimizer": adam, "schedule": "1f1b"}
    with Pipeline(model, sample, boundaries=[2], **choices) as pipe:
        memory = pipe.predicted_memory[0]
    assert memory.transients > memory.parameters / 2  # the step of the optimizer is where the peak is
    with pytest.raises(MemoryLimitError):
        Pipeline(
            model, sample, search=Search(memory_limit_bytes=memory.total_bytes - memory.transients // 2), **choices
        )


@pytest.mark.parametrize("devices", [2, 1])
def test_a_larger_batch_than_was_planned_for_does_not_break_the_limit_silently(devices):
    model, x = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))), torch.rand(128, 32)
    choices = {"loss_fn": functional.mse_loss, "devices": ["cpu"] * devices, "num_microbatches": 4}
    with Pipeline(model, x[:8], search=Search(memory_limit_bytes=10**9), schedule="1f1b", **choices) as pipe:
        limit = max(own.total_bytes for own in pipe.predicted_memory)
    with Pipeline(model, x[:8], search=Search(memory_limit_bytes=limit), schedule="1f1b", **choices) as pipe:
        pipe.step(x[:32], target=x[:32])
        pipe.step(x[:31], target=x[:31])
        before = [parameter.grad.clone() for parameter in pipe.parameters()]
        match = (
            r"than memory_limit_bytes allows; this plan allows 32 rows in 4 micro-batches of 8, but this step has 128 "
            r"rows in 4 micro-batches of up to 32, so rank \d needs .*, .* more than its limit of .*; pass "
            r"at most 32 rows, or make the pipeline with search=Search\(batch_size=128, ...\)"
        )
        with pytest.raises(MemoryLimitError, match=match):
            pipe.step(x, target=x)
        assert all(map(torch.equal, before, (parameter.grad for parameter in pipe.parameters())))
    with Pipeline(model, x[:8], search=Search(memory_limit_bytes=10 * limit), schedule="1f1b", **choices) as pipe:
        assert pipe.step(x, target=x).isfinite()
