"""Executors: run the orders of a program, with threads in this process or one process per rank."""
