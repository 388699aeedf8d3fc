"""How values travel between ranks in different processes."""
