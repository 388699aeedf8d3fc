"""Runtime: runs programs, with stages, executors, transport and coordination of ranks."""
