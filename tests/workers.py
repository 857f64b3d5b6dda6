"""What keeps tests apart that run side by side, each worker of pytest-xdist with its own."""

import os
from urllib.parse import urlsplit

WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
# 0 is the platform's, 1 that of tests which run alone.
FIRST_REDIS_NUMBER = 2


def redis_url(given: str) -> str:
    """Return the address of this worker's numbered database of a Redis."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return given
    return urlsplit(given)._replace(path=f"/{FIRST_REDIS_NUMBER + WORKER}").geturl()
