"""Runtime: the stages, executors, transport and coordination that run a program."""
