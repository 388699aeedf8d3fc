"""The launcher: starts the ranks of a job as processes, and goes on with the other ranks if one is lost."""
