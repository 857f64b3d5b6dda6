"""The agent's event loop: file descriptors, timers and child processes on one thread.

One thread, so that a fork is always safe and nothing needs a lock. `asyncio` would do the
same for two more seconds of import time under software emulation.
"""

from __future__ import annotations

import heapq
import os
import select
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
HANG_UP = select.EPOLLHUP | select.EPOLLERR
EDGE = select.EPOLLET


class Timer:
    """Something to do later; `cancel` may be called at any time, also twice."""

    __slots__ = ("act", "at_s")

    def __init__(self, at_s: float, act: Callable[[], None]) -> None:
        self.at_s = at_s
        self.act: Callable[[], None] | None = act

    def cancel(self) -> None:
        self.act = None

    def __lt__(self, other: Timer) -> bool:
        return self.at_s < other.at_s


class Loop:
    """Calls back on what happens; callbacks never block and never raise on purpose."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._timers: list[Timer] = []
        self._children: dict[int, Callable[[int], None]] = {}
        self._running = True
        self._signal_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGQUIT):
            # A shell that starts us in the background ignores them, and commands inherit that.
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        self.watch(self._signal_fd, READ, self._reap)

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        """Call `handler` with the events that `fd` has; errors and hang-ups always count."""
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        """Wait for other events of a watched descriptor."""
        self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Stop watching `fd`, before it is closed; fine when it is not watched."""
        if self._handlers.pop(fd, None):
            self._epoll.unregister(fd)

    def later(self, delay_s: float, act: Callable[[], None]) -> Timer:
        """Call `act` once, after `delay_s` of running time."""
        timer = Timer(time.monotonic() + delay_s, act)
        heapq.heappush(self._timers, timer)
        return timer

    def await_child(self, pid: int, ended: Callable[[int], None]) -> None:
        """Call `ended` with the wait status of a child forked in this same turn."""
        self._children[pid] = ended

    def stop(self) -> None:
        self._running = False

    def run(self) -> None:
        """Turn until stopped."""
        self._running = True
        while self._running:
            self.turn()

    def turn(self) -> None:
        """Wait for what happens next, and call back on it."""
        for fd, events in self._epoll.poll(self._timeout_s()):
            handler = self._handlers.get(fd)
            if handler:  # an earlier one of this turn may have forgotten it
                handler(events)
        self._run_timers()

    def close(self) -> None:
        """Let go of the descriptors and the wake-up of signals."""
        write_fd = signal.set_wakeup_fd(-1)
        for fd in (write_fd, self._signal_fd):
            os.close(fd)
        self._epoll.close()

    def _timeout_s(self) -> float | None:
        while self._timers and self._timers[0].act is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return None
        return max(0.0, self._timers[0].at_s - time.monotonic())

    def _run_timers(self) -> None:
        now_s = time.monotonic()
        while self._timers and self._timers[0].at_s <= now_s:
            act = heapq.heappop(self._timers).act
            if act:
                act()

    def _reap(self, _events: int) -> None:
        try:
            while os.read(self._signal_fd, 4096):
                pass
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            ended = self._children.pop(pid, None)
            if ended:
                ended(status)
