"""The console pages of billing."""
