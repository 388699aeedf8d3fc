"""What ``pipesched.partitioning.partition`` is made of: a graph, what it may be cut into, the search, and the answer.

``layers`` reads a graph's costs as whole numbers; ``blocks`` are layers that share a stage. ``slots`` say what the
stages may be, ``problem`` puts both together. ``bisection`` looks for the smallest bottleneck that a probe admits;
``chain`` probes one order of the layers, ``lattice`` all orders at once. ``search`` chooses between them.
"""
