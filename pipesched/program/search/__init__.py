"""Search: finds orders that are made for given times and memory limits, as sequences of whole numbers."""
