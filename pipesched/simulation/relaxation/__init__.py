"""Relaxation: what a single rank has to do, with every other rank as a delay. Bounds on the makespan follow."""
