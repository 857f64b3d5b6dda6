"""A pytest plugin for `bin/test`: counts the chosen tests of its two phases.

The counts go to the file that COUNTS_FILE names, since pytest's own words are for people.
"""

import json
import os
from pathlib import Path

import pytest

PLATFORM_MARKS = ("guest", "browser")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Write how many need a platform, and how many do not."""
    needs = [
        any(item.get_closest_marker(mark) for mark in PLATFORM_MARKS) for item in session.items
    ]
    counts = {"ordinary": needs.count(False), "platform": needs.count(True)}
    Path(os.environ["COUNTS_FILE"]).write_text(json.dumps(counts))
