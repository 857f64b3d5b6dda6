"""Runs all of Sandkeep on one machine: services, images, processes."""
