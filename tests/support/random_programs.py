"""Random valid programs, with any placement, any stage graph, whole or split backwards, and any valid order."""

import random

from hypothesis import settings
from hypothesis import strategies as st

from pipesched import Action, Costs, Kind, Program, schedules
from pipesched.program.dependencies import StageGraph, chain
from pipesched.program.validation import validate

quick = settings(max_examples=60)


def fitting(name, num_ranks):
    """Return this number of ranks, or one more if the schedule needs an even number."""
    return num_ranks + num_ranks % 2 if schedules.get(name).num_chains > 1 else num_ranks


@st.composite
def programs(draw, max_stages=5, max_microbatches=4):
    """Draw a valid compute-only program whose ranks run their actions in a random valid order."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    num_stages = draw(st.integers(1, max_stages))
    num_microbatches = draw(st.integers(1, max_microbatches))
    program = random_program(rng, num_stages, num_stages, num_microbatches, skips=draw(st.booleans()))
    return program.forward() if draw(st.integers(0, 5)) == 0 else program


def random_program(rng, num_ranks, num_stages, num_microbatches, *, skips, recomputes=False, ascending=False):
    """Return a random valid program of this shape.

    skips: any stage may send to any later stage. recomputes: some backwards have an R, at a random earlier place.
    ascending: each stage runs the micro-batches in ascending order, as `Program.exact` requires.
    """
    placement = tuple(rng.randrange(num_ranks) for _ in range(num_stages))
    graph = chain(num_stages)
    if skips:
        pairs = [(a, b) for b in range(num_stages) for a in range(b)]
        graph = StageGraph.of(num_stages, [pair for pair in pairs if rng.random() < 0.6])
    actions = [
        Action(stage, kind, microbatch)
        for stage in range(num_stages)
        for microbatch in range(num_microbatches)
        for kind in (
            *rng.choice([(Kind.F, Kind.B), (Kind.F, Kind.I, Kind.W)]),
            *((Kind.R,) if recomputes and rng.random() < 0.5 else ()),
        )
    ]
    orders = _shuffled(actions, placement, num_microbatches, graph, rng, num_ranks, ascending)
    return Program(orders, placement, num_microbatches, graph)


def _shuffled(actions, placement, num_microbatches, graph, rng, num_ranks, ascending):
    """Add the actions to the ranks' orders in a random order that keeps all dependencies."""
    asked = Program((tuple(actions),), placement, num_microbatches, graph)
    needs = {action: set(asked.needs(action)) for action in actions}
    if ascending:
        for family in (Kind.F,), (Kind.B, Kind.I), (Kind.B, Kind.W):
            own = [action for action in actions if action.kind in family]
            for one in own:
                needs[one] |= {b for b in own if b.stage == one.stage and b.microbatch == one.microbatch - 1}
    orders = [[] for _ in range(num_ranks)]
    left, done = list(actions), set()
    while left:
        action = rng.choice([action for action in left if needs[action] <= done])
        left.remove(action)
        done.add(action)
        orders[placement[action.stage]].append(action)
    return tuple(map(tuple, orders))


@st.composite
def costs_for(draw, program, **others):
    """Draw integer costs for the stages of a program, so that sums are exact."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    times = ([rng.randint(0, 9) for _ in range(program.num_stages)] for _ in range(4))
    return Costs(*times, transfer_s=draw(st.integers(0, 6)), **others)


#: Programs in which a rank uses messages in a different order from the order in which they were sent.
OUT_OF_ORDER = [
    "microbatches 2\nrank 0: 0F0 0F1 0B1 0B0\nrank 1: 1F1 1F0 1B0 1B1\n",
    "microbatches 3\nrank 0: 0F2 0F0 0F1 0B0 0B1 0B2\nrank 1: 1F1 1F2 1F0 1B2 1B1 1B0\n",
    "microbatches 2\nplacement 0 1 0\nrank 0: 0F0 0F1 2F1 2B1 2F0 2B0 0B0 0B1\nrank 1: 1F1 1F0 1B1 1B0\n",
]


def random_text(seed: int) -> str:
    rng = random.Random(seed)
    shape = rng.randint(3, 6), rng.randint(1, 4)
    program = random_program(rng, 3, *shape, skips=rng.random() < 0.5)
    program = program.forward() if rng.random() < 0.2 else program
    validate(program)
    return str(program)
