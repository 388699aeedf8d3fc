"""Any stage graph, placement and order, with real layers: gradients equal those of a loop without a pipeline."""

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch

from pipesched import Program
from pipesched.program.actions import Kind
from pipesched.runtime.executors.threads import ThreadExecutor
from tests.support import stage_graph_training as graphs
from tests.support.rank_processes import Ranks

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("every_product_deferred")]

SEEDS = range(128)
PARTS = [SEEDS[start : start + 32] for start in range(0, 128, 32)]


@pytest.fixture(scope="module")
def executor() -> Iterator[ThreadExecutor]:
    executor = ThreadExecutor([torch.device("cpu")] * graphs.NUM_RANKS, intra_op_threads=1)
    yield executor
    executor.close()


@cache
def expected(seed: int) -> graphs.Result:
    return graphs.by_hand(graphs.program_of(seed), seed)


def check(seed: int, found: graphs.Result) -> None:
    """Equal to the bit where the program is exact; else within rounding, where the order makes no other difference."""
    program, wanted = graphs.program_of(seed), expected(seed)
    assert found.keys() == wanted.keys(), seed
    for name, value in wanted.items():
        if program.exact:
            assert np.array_equal(found[name], value), (seed, name, str(program))
        elif name[0] != "buffer":  # running statistics depend on the order
            np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-14, err_msg=f"{seed}, {name}")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seeds", PARTS, ids=str)
def test_random_programs_over_a_mesh_have_the_right_gradients(ranks: Ranks, seeds: range) -> None:
    by_rank = ranks.run(graphs.NUM_RANKS, graphs.over_mesh, list(seeds))
    for seed, parts in zip(seeds, zip(*by_rank, strict=True), strict=True):
        check(seed, {name: value for part in parts for name, value in part.items()})


@pytest.mark.one_in(6)
@pytest.mark.parametrize("seeds", PARTS, ids=str)
def test_random_programs_in_process_have_the_right_gradients(executor: ThreadExecutor, seeds: range) -> None:
    for seed in seeds:
        check(seed, graphs.by_executor(executor, graphs.program_of(seed), seed))


def test_the_random_programs_cover_all_kinds_of_programs() -> None:
    programs = [graphs.program_of(seed) for seed in SEEDS]
    training = [program for program in programs if not program.forward_only]
    assert len(programs) - len(training) >= 12
    assert sum(program.exact for program in training) >= 40
    assert sum(not program.exact for program in training) >= 30
    assert sum(any(len(ends) > 1 for ends in program.graph.producers) for program in training) >= 40
    assert sum(any(len(ends) > 2 for ends in program.graph.consumers) for program in training) >= 20
    for kind in (Kind.B, Kind.I, Kind.R):
        assert sum(program.index.has(kind) for program in training) >= 30


def test_a_step_that_learns_from_a_later_micro_batch_adds_in_order(executor: ThreadExecutor) -> None:
    """The first forward that is kept is that of micro-batch 2: those before it run again behind it."""
    order = "0F0 0F1 0F2 0R0 0I0 0R1 0I1 0I2 0W0 0W1 0W2"
    program = Program.parse(f"microbatches 3\nplacement 0\nrank 0: {order}\nrank 1:\nrank 2:\n")
    assert program.exact
    wanted = graphs.by_hand(program, 5)
    found = graphs.by_executor(executor, program, 5)
    assert [name for name in wanted if not np.array_equal(found[name], wanted[name])] == []
