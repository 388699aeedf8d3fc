"""Partitioning: divides a graph of layers into pipeline stages with the smallest possible bottleneck.

``layer_arrays`` reads the costs of a graph as integers, and ``blocks`` groups layers that must share a stage. ``slots``
describes the stages that a partition may have, and ``problem`` combines blocks and slots. ``bisection`` searches for
the smallest bottleneck. It calls a probe, which looks for a partition within a given bottleneck: ``chain`` probes one
order of the layers, ``lattice`` probes all orders together. ``search`` chooses the probe.
"""
