"""The command ``pipesched``."""
