"""The HTTP API of billing."""
