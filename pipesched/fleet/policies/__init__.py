"""Policies: what a fleet does when ranks are lost or come back. One file for each policy."""
