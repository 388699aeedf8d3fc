"""Coordination: brings ranks in different processes together, and detects and reports a failed rank."""
