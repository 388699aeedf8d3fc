"""Partitioning: divides a graph of layers into pipeline stages with the smallest possible bottleneck.

The bottleneck is the time that the slowest rank or transfer takes for one micro-batch.

``layer_arrays`` reads the costs of a graph's layers as integers, and ``blocks`` groups layers that must share a stage.
``slots`` describes the stages that a partition can have, and ``problem`` combines blocks and slots. ``bisection``
searches for the smallest bottleneck. It repeatedly calls a probe: a function that looks for a partition whose
bottleneck is at most a bound. ``chain`` probes one order of the layers, and ``lattice`` probes all orders together.
``search`` chooses the probe. Times are whole numbers of ticks. A tick is a picosecond, or a longer time if the times of
the layers are large.
"""
