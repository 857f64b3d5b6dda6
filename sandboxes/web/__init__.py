"""The console pages of sandboxes."""
