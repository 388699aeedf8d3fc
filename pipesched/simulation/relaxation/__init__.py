"""Relaxation: lower bounds on the makespan from a model of one rank, in which other ranks only cause delays."""
