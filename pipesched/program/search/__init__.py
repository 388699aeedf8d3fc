"""Search: finds orders with a short makespan for given times and memory limits. Actions are represented by integers."""
