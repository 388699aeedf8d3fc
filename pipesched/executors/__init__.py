"""Executors: one interpreter of a rank's order, and the transports it runs on."""
