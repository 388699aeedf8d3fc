"""A simulated accelerator for tests: tensors of the device type `sim`, streams, events, and a judge of their order.

Start it with :func:`tests.simulated.accelerator.start`, in a process of its own, because torch cannot unregister it.
"""
