"""Relaxation: lower bounds on the makespan from a model of one rank, in which the other ranks are only delays."""
