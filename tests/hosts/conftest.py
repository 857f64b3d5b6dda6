"""What tests of a host share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Give a folder with a short name.

    A unix socket's path holds 107 bytes, and pytest's own folders take most of them.
    """
    with tempfile.TemporaryDirectory(
        prefix="sk-", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)
