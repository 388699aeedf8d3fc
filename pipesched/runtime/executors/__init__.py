"""Executors: interpret a program's orders, by threads of this process or by one process a rank."""
