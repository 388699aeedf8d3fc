"""Synthetic layer graphs with the shapes of real models."""

import random
from itertools import count, pairwise

import networkx as nx


class _Builder:
    def __init__(self, seed):
        self.graph, self._rng, self._numbers = nx.DiGraph(), random.Random(seed), count()

    def layer(self, before, time_s=None, size=None):
        """Add a layer after other layers; by default its costs are random."""
        name = f"layer{next(self._numbers)}"
        time = self._rng.uniform(1e-4, 3e-3) if time_s is None else time_s
        output = self._rng.randrange(10**6, 10**8) if size is None else size
        self.graph.add_node(
            name, forward_s=time, backward_s=2 * time, output_bytes=output, parameter_bytes=self._rng.randrange(10**7)
        )
        self.graph.add_edges_from((earlier, name) for earlier in before)
        return name

    def run(self, before, length):
        """Add layers in a chain."""
        for _ in range(length):
            before = self.layer([before])
        return before


def branches(modules, seed=0):
    """Return a chain of modules with parallel branches. ``modules`` holds the lengths of each module's branches."""
    build = _Builder(seed)
    last = build.run(build.layer([]), 3)
    for lengths in modules:
        last = build.layer([build.run(last, length) for length in lengths], time_s=1e-5)
    return build.graph


def residual(num_blocks, seed=0):
    """Return a chain of blocks of three layers, each with a skip connection. Every fourth skip contains a layer."""
    build = _Builder(seed)
    last = build.layer([])
    for block in range(num_blocks):
        inner = build.run(last, 3)
        skip = build.layer([last]) if block % 4 == 0 else last
        last = build.layer([inner, skip], time_s=0)
    return build.graph


def u_net(depth, seed=0):
    """Return a graph in which each level on the way down is used again on the way up."""
    build = _Builder(seed)
    down = [build.layer([])]
    for _ in range(depth):
        down.append(build.run(down[-1], 2))
    last = down[-1]
    for skip in reversed(down[:-1]):
        last = build.run(build.layer([last, skip]), 1)
    return build.graph


def weights_as_layers(length, seed=0):
    """Return a chain whose layers have weights as separate input layers. It has 2 ** length useless order ideals."""
    build = _Builder(seed)
    layers = [build.layer([build.layer([], time_s=0, size=100)], time_s=1e-3 * (1 + i % 7)) for i in range(length)]
    build.graph.add_edges_from(pairwise(layers))
    return build.graph


def chain(length, seed=0):
    """Return layers in a chain."""
    build = _Builder(seed)
    build.run(build.layer([]), length - 1)
    return build.graph
