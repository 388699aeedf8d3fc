"""Cases of foreign code over two ranks."""

import sys
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from foreign_case import outcome_of
from foreign_kinds import draw_case


def outcome(group: Any, seed: int) -> tuple[str, str]:
    """Train the case of a seed plain and as a pipeline. Returns the outcome and its detail."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    found = outcome_of(draw_case(seed), group.rank(), mesh)
    return found.word, found.detail
