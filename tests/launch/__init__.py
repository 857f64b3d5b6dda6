"""Tests of what starts and stops the platform."""
