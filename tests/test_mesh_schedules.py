"""Every schedule over a mesh of real gloo ranks, to the bit as in one process. One set of processes serves all."""

import jobs_schedules as jobs
import pytest
from models import synchronous_names
from random_programs import fitting
from ranks import Ranks

from pipesched import schedules

pytestmark = pytest.mark.timeout(60)

SHARED = [name for name in schedules.names() if (p := schedules.get(name).program(2, 2)).num_weights < p.num_stages]


@pytest.mark.parametrize("name", synchronous_names())
def test_every_name_trains_over_a_mesh(ranks: Ranks, name: str) -> None:
    ranks.run(fitting(name, 2), jobs.trains, name)


@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", SHARED)
def test_copies_of_layers_in_other_processes(ranks: Ranks, name: str, num_ranks: int, checkpoint: str) -> None:
    ranks.run(num_ranks, jobs.shared_weights, name, checkpoint)
