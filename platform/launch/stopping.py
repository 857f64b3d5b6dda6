"""A request to stop, by a Ctrl-C or a TERM."""

import signal
import threading
from types import FrameType


class StopRequest:
    """Takes the two signals over; whoever has one asks it between two short waits."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._event = threading.Event()
        # Handlers, not SIG_IGN, which children would inherit.
        signal.signal(signal.SIGINT, self._note)
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for a request; return whether it came."""
        return self._event.wait(timeout_s)
