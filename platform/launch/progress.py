"""What a person sees while a long start goes on."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# A step that says nothing for longer looks hung.
REMINDER_S = 15.0


class LaunchFailed(Exception):
    """A step did not work; the text tells a person what to do about it."""


def say(text: str = "") -> None:
    """Print a line at once, also when the output is a file that another process follows."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextmanager
def step(what: str) -> Iterator[None]:
    """Announce a step, remind of it while it lasts, and say how long it took."""
    started_at = time.monotonic()
    say(f"· {what} …")
    done = threading.Event()

    def remind() -> None:
        while not done.wait(REMINDER_S):
            say(f"  {what}: still at it after {time.monotonic() - started_at:.0f} s")

    reminder = threading.Thread(target=remind, daemon=True)
    reminder.start()
    try:
        yield
    except BaseException:
        say(f"✗ {what}  {time.monotonic() - started_at:.1f} s")
        raise
    finally:
        done.set()
        reminder.join()
    say(f"✓ {what}  {time.monotonic() - started_at:.1f} s")
