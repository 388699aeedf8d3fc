"""Synthetic layer graphs with the shapes of real models."""

import random
from itertools import count, pairwise

import networkx as nx


class _Builder:
    def __init__(self, seed):
        self.graph, self._rng, self._numbers = nx.DiGraph(), random.Random(seed), count()

    def layer(self, before, time_s=None, size=None):
        """A layer behind others; its costs are random unless given."""
        name = f"layer{next(self._numbers)}"
        time = self._rng.uniform(1e-4, 3e-3) if time_s is None else time_s
        output = self._rng.randrange(10**6, 10**8) if size is None else size
        self.graph.add_node(
            name, forward_s=time, backward_s=2 * time, output_bytes=output, parameter_bytes=self._rng.randrange(10**7)
        )
        self.graph.add_edges_from((earlier, name) for earlier in before)
        return name

    def run(self, before, length):
        """Layers one after the other."""
        for _ in range(length):
            before = self.layer([before])
        return before


def branches(modules, seed=0):
    """Modules of parallel branches: for each module the lengths of its branches."""
    build = _Builder(seed)
    last = build.run(build.layer([]), 3)
    for lengths in modules:
        last = build.layer([build.run(last, length) for length in lengths], time_s=1e-5)
    return build.graph


def residual(num_blocks, seed=0):
    """Blocks of three layers, each passed by a skip connection; every fourth also over a layer of its own."""
    build = _Builder(seed)
    last = build.layer([])
    for block in range(num_blocks):
        inner = build.run(last, 3)
        skip = build.layer([last]) if block % 4 == 0 else last
        last = build.layer([inner, skip], time_s=0)
    return build.graph


def u_net(depth, seed=0):
    """Each level down is needed again on the way up."""
    build = _Builder(seed)
    down = [build.layer([])]
    for _ in range(depth):
        down.append(build.run(down[-1], 2))
    last = down[-1]
    for skip in reversed(down[:-1]):
        last = build.run(build.layer([last, skip]), 1)
    return build.graph


def weights_as_layers(length, seed=0):
    """A chain of which each layer has a source of its own: 2 ** length ideals, none of them of use."""
    build = _Builder(seed)
    layers = [build.layer([build.layer([], time_s=0, size=100)], time_s=1e-3 * (1 + i % 7)) for i in range(length)]
    build.graph.add_edges_from(pairwise(layers))
    return build.graph


def chain(length, seed=0):
    """Layers one after the other."""
    build = _Builder(seed)
    build.run(build.layer([]), length - 1)
    return build.graph
