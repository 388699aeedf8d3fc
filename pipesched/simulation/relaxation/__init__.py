"""Relaxation: computes bounds on the makespan with a model of one rank, in which other ranks only cause delays."""
