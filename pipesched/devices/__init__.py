"""Devices: everything that pipesched asks of an accelerator. No other package names a vendor's module of torch.

The functions use ``torch.accelerator``, ``torch.Stream`` and ``torch.Event``, and the device type's own module
(``torch.get_device_module``) where these do not suffice.
"""
