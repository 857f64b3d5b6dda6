"""`bin/down`: stop what bin/up started, also when its supervisor is no longer there."""

import os
import sys

from launch import processes
from launch.config import load
from launch.processes import PidFiles
from launch.progress import LaunchFailed, say
from launch.stack import stop_leftovers
from launch.up import SUPERVISOR

# Longer than all programs together may take to stop.
STOP_TIMEOUT_S = 180.0


def main() -> int:
    """Run the command; return its exit code."""
    try:
        config = load(os.environ)
    except LaunchFailed:
        say("Nothing runs: bin/up was never run here.")
        return 0
    supervisor = PidFiles(config.pid_dir).read(SUPERVISOR)
    if supervisor is not None:
        say("Stopping …")
        processes.stop(supervisor, timeout_s=STOP_TIMEOUT_S)
    stop_leftovers(config)
    say("Stopped. bin/up starts it again, with everything that was saved.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
