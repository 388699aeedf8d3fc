"""Synthetic profiles: profiles of a chain of layers with given times."""

import networkx as nx

from pipesched.simulation.profile import Profile


def row(times, *, rows=1, fixed_s=0.0, split=1.0, parameter_bytes=1000, activation_bytes=100, output_bytes=10):
    """Return a chain of layers. ``times`` are the seconds of each layer's F for one row of the batch.

    B takes twice as long as F, and I and W each take ``split`` times as long as F.
    """
    graph = nx.DiGraph(parameters={})
    for at, seconds in enumerate(times):
        name, forward_s = f"layer{at}", seconds * rows + fixed_s
        size = parameter_bytes[at] if isinstance(parameter_bytes, list) else parameter_bytes
        graph.graph["parameters"][f"{name}.weight"] = (size // 4, size)
        graph.add_node(
            name,
            forward_s=forward_s,
            backward_s=2 * forward_s,
            input_grad_s=forward_s * split,
            weight_grad_s=forward_s * split,
            input_bytes=output_bytes * rows,
            output_bytes=output_bytes * rows,
            activation_bytes=activation_bytes * rows,
            weight_grad_bytes=2 * output_bytes * rows,
            parameter_bytes=size,
            num_parameters=size // 4,
            parameters=(f"{name}.weight",),
            buffers=(),
        )
        if at:
            graph.add_edge(f"layer{at - 1}", name, bytes=output_bytes * rows, tensors={"out": output_bytes * rows})
    return graph


def profile(times, sizes=(1,), **layers):
    return Profile({rows: row(times, rows=rows, **layers) for rows in sizes}, model="a row")
