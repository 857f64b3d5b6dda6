"""The HTTP API of sandboxes."""
