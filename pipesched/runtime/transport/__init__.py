"""Transport: how values travel between ranks in different processes."""
