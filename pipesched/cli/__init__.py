"""The command line interface: the command ``pipesched``."""
