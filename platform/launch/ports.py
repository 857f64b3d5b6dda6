"""Finding loopback ports that nobody uses."""

import socket

from launch.progress import LaunchFailed

LOOPBACK = "127.0.0.1"
# Tried in turn when the preferred port is taken: enough for many checkouts on one machine.
ATTEMPTS = 200


def is_free(port: int) -> bool:
    """Tell whether a server could listen on this loopback port now."""
    with socket.socket() as probe:
        # As servers do, or a port of a server that was just stopped would look taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def free_block(preferred: int, *, size: int = 1, avoid: frozenset[int] = frozenset()) -> int:
    """Return the first port of `size` free neighbours, at `preferred` or soon above it.

    Raises:
        LaunchFailed: there is none.
    """
    for attempt in range(ATTEMPTS):
        first = preferred + attempt * size
        block = range(first, first + size)
        if not avoid.intersection(block) and all(is_free(port) for port in block):
            return first
    raise LaunchFailed(f"No free port was found from {preferred} up.")
