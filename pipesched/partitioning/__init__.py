"""Partitioning: divides a graph of layers into pipeline stages with the smallest possible bottleneck.

``layer_arrays`` reads the costs of a graph as integers, and ``blocks`` groups layers that share a stage. ``slots`` has
the stages that a partition may have, and ``problem`` combines blocks and slots. ``bisection`` searches for the smallest
bottleneck with a probe: ``chain`` probes one order of the layers, ``lattice`` all orders at once. ``search`` chooses
between them.
"""
