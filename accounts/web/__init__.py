"""The console pages of accounts."""
