"""Valid files: samples of every kind of file that pipesched reads, as text or bytes."""

import json
import struct
from dataclasses import replace
from functools import cache
from itertools import pairwise

import networkx as nx

import pipesched
from pipesched import Costs, Plan, Profile, Trace, schedules, simulate
from pipesched.program.lowering import lower
from pipesched.simulation.links import Link, Links
from pipesched.simulation.overheads import Machine, Overheads

__all__ = [
    "LINKS", "MACHINE", "costs", "index", "options", "plans", "profile", "programs", "tables", "traces", "weights"
]  # fmt: skip


def programs() -> list[str | bytes]:
    """Return programs in text form."""
    shapes = {"dualpipe": 4, "chimera": 4}
    found: list[str | bytes] = []
    for name in schedules.names(sliced=True):
        program = schedules.get(name).program(shapes.get(name, 3), 4)
        found.append(str(program))
        if name in ("1f1b", "zb-v", "interleaved-1f1b"):
            found += [str(lower(program)), str(program.forward())]
    found.append("name skips\nmicrobatches 2\nedges 0-1 0-2 1-2\nrank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1\n"
                 "rank 2: 2F0 2B0 2F1 2B1\n")  # fmt: skip
    return found


def tables() -> list[str | bytes]:
    """Return programs in the CSV form of torch.distributed.pipelining."""
    names = ("1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "zb-v", "hanayo")
    programs = [schedules.get(name).program(3, 4) for name in names]
    return ["".join(",".join(map(str, order)) + "\n" for order in program.orders) for program in programs]


def costs(num_stages: int) -> Costs:
    """Return costs of uniform stages, with links and overheads."""
    return Costs.uniform(
        num_stages,
        forward_s=0.5,
        input_grad_s=0.25,
        weight_grad_s=0.25,
        transfer_s=0.125,
        activation_bytes=100,
        input_bytes=10,
        output_bytes=10,
        weight_bytes=1000,
        gradient_bytes=1000,
        links=LINKS,
        overheads=_OVERHEADS,
    )


_OVERHEADS = Overheads(1e-4, 1e-5, Link(1e-5, 1e9), Link(2e-5, 2e9), Link(1e-6, 1e10), (1.0, 1.5, 1.75))
LINKS = Links(Link(1e-6, 50e9, 0.1), Link(1e-5, 10e9), (0, 0, 1, 1), {(0, 1): Link(1e-3, 1e6)}, contended=True)
MACHINE = Machine("a processor", Links(), _OVERHEADS, _OVERHEADS, 20e9)


def _row(rows: int) -> "nx.DiGraph[str]":
    graph: nx.DiGraph[str] = nx.DiGraph(parameters={})
    names = [f"layer{at}" for at in range(5)]
    for at, name in enumerate(names):
        graph.graph["parameters"][f"{name}.weight"] = (250, 1000)
        seconds = 0.001 * (at + 1) * rows
        numbers = {
            "forward_s": seconds,
            "backward_s": 2 * seconds,
            "input_grad_s": seconds,
            "weight_grad_s": seconds,
            "input_bytes": 10 * rows,
            "output_bytes": 10 * rows,
            "activation_bytes": 100 * rows,
            "weight_grad_bytes": 20 * rows,
            "parameter_bytes": 1000,
            "num_parameters": 250,
            "gradient_bytes": 1000,
        }
        graph.add_node(name, **numbers, parameters=(f"{name}.weight",), buffers=())
    for one, other in pairwise(names):
        graph.add_edge(one, other, bytes=10 * rows, tensors={f"{one}:0": 10 * rows})
    graph.add_edge("layer0", "layer4", bytes=10 * rows, tensors={"layer0:0": 10 * rows})
    return graph


@cache
def profile() -> Profile:
    """Return the profile of a chain of layers."""
    return Profile({rows: _row(rows) for rows in (2, 4, 8)}, "a row", MACHINE)


@cache
def plans() -> list[str | bytes]:
    """Return plans as JSON: one from a search, and some written by hand."""
    made = pipesched.tune(profile(), num_ranks=2, batch_size=8, memory_limit_bytes=100_000, effort=30_000)
    interleaved = schedules.get("interleaved-1f1b").with_options(chunks_per_rank=2)
    stages = (("a", "b"), ("c",), ("d",), ("e",))
    plans = [
        made,
        Plan(stages, interleaved.name, interleaved.program(2, 4), "always", costs(4), interleaved.options),
        Plan(stages, "dualpipe", schedules.get("dualpipe").program(4, 4), {"a": "recompute", "c": "offload"}),
        Plan(stages[:2], "zb-auto", schedules.get("zb-auto").program(2, 4), costs=costs(2)),
        Plan(stages[:2], "mine", replace(schedules.get("1f1b").program(2, 3), name="mine"), "except_last"),
    ]
    return [json.dumps(plan.to_dict(), indent=1) for plan in plans]


def traces() -> list[Trace]:
    """Return simulated traces of lowered programs."""
    shapes = {"1f1b": (3, 4), "zb-h1": (2, 3), "dualpipe-v": (2, 4), "pipedream": (2, 3)}
    programs = [schedules.get(name).program(*shape) for name, shape in shapes.items()]
    return [simulate(lower(program), costs(program.num_stages)) for program in programs]


def options() -> list[str | bytes]:
    """Return a JSON text for every schedule, with its name, its options and a shape.

    Options that contain schedules are left out.
    """
    found = [
        {"schedule": name, "options": {k: v for k, v in schedules.get(name).options.items() if k != "starts"}}
        for name in schedules.names(sliced=True)
    ]
    return [json.dumps({**one, "num_ranks": 4, "num_microbatches": 4, "steps": 1}) for one in found]


def weights(name: str) -> bytes:
    """Return the bytes of a safetensors file with two tensors."""
    header = {
        "__metadata__": {"format": "pt"},
        f"{name}.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        f"{name}.bias": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(range(32))


def index() -> list[str | bytes]:
    """Return the index of two safetensors files, as JSON."""
    there = {"a.weight": "a.safetensors", "a.bias": "a.safetensors", "b.weight": "b.safetensors"}
    return [json.dumps({"metadata": {"total_size": 64}, "weight_map": {**there, "b.bias": "b.safetensors"}})]
