"""Relaxation: lower bounds on the makespan from one rank alone, with the other ranks replaced by delays."""
