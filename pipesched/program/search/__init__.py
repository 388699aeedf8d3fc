"""Search: finds short orders for given times and memory limits. Actions are represented by whole numbers."""
