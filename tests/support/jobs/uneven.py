"""Jobs of test_uneven_orders: pipelines that make orders for micro-batches of different lengths."""

from typing import Any

import torch
from torch import distributed

from pipesched import Distributed, Microbatch, Pipeline, Search, graph_of
from pipesched.simulation.layer_costs import TIMES, LayerCosts
from pipesched.simulation.profile import Profile
from pipesched.simulation.size_fit import SizeFit
from tests.support import cut_batches, places
from tests.support.cut_batches import looped, parts, tagger
from tests.support.models import assert_as

#: Lengths of the micro-batches of four steps. The last two steps have the same sizes after rounding.
STEPS = ((3, 14, 5, 30), (30, 5, 3, 14), (4, 16, 8, 40), (4, 16, 8, 41))


def profile() -> Profile:
    """Return a profile of the tagger: every layer takes 1 ms per 8 tokens, and the head three times as long."""
    model = tagger()
    graph = graph_of(model, {"tokens": torch.zeros(2, 4, dtype=torch.int64), "mask": torch.ones(2, 4)}, measured=False)
    for name, node in graph.nodes(data=True):
        seconds = dict.fromkeys(TIMES, 0.003 if name == "head" else 0.001)
        node.update({**LayerCosts().figures(), **node, **seconds, "backward_s": 2 * seconds["forward_s"]})
        node.update({key: 0 for key, value in node.items() if value is None})
    fit = {name: dict.fromkeys(TIMES, (0.0, 1.0, 0.0)) for name in graph}
    return Profile({2: graph}, size_fit=SizeFit(fit))


def pipeline(where: dict[str, Any], **options: Any) -> Pipeline:
    given: dict[str, Any] = {"schedule": "searched", "search": Search(profile=profile())}
    return cut_batches.pipeline(tagger(), where, **given | options)


def batch(lengths: tuple[int, ...]) -> list[Microbatch]:
    return parts(lengths, (2,) * len(lengths))


def trains(group: Any, inputs: Any = "all") -> list[tuple[str, int]]:
    """Check that steps over micro-batches of different lengths are bit-identical to a plain loop.

    Returns, for each step, the name of its trace and the number of searches for an order so far.
    """
    expected = tagger()
    has_batch = inputs == "all" or places.is_one_process(group) or not group.rank()
    seen = []
    with pipeline(places.place(group, inputs)) as pipe:
        for step, lengths in enumerate((*STEPS, (7,) * 4)):
            loss = pipe.step(microbatches=batch(lengths) if has_batch else None)
            assert torch.equal(loss, looped(expected, batch(lengths), step))
            assert_as(pipe, expected)
            seen.append((pipe.trace.name, pipe._running.assembly.programs.num_searched))
    return seen


def replicas(group: Any, inputs: Any) -> list[tuple[str, int]]:
    """Train two replicas whose micro-batches have different lengths. Checks and returns the same as `trains`."""
    expected = tagger()
    own = distributed.get_rank() // 2
    where = {"mesh": places.mesh_of(2, 2), "distributed": Distributed(inputs=inputs, timeout=600)}
    seen = []
    with pipeline(where) as pipe:
        for step, lengths in enumerate(STEPS):
            of_replicas = [batch(lengths), batch(lengths[::-1])]
            whole = [one for each in of_replicas for one in each]
            given = of_replicas[own] if inputs == "all" else None if distributed.get_rank() else whole
            loss = pipe.step(microbatches=given)
            assert torch.equal(loss, looped(expected, whole, step, num_replicas=2))
            assert_as(pipe, expected)
            seen.append((pipe.trace.name, pipe._running.assembly.programs.num_searched))
    return seen
