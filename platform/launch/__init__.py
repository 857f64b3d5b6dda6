"""Starts, watches and stops everything on one machine: what the commands in bin/ run."""
