"""The host's end of the second door: a virtio-serial port that needs no network.

QEMU listens on a unix socket and passes one connection at a time to the guest. Each call
opens its own, so that nothing is held between calls, and threads wait for each other. What
an earlier connection left on the way is told apart by the id of its request.

Nothing that the guest says is believed: lengths, waits and types are bounded here.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from common.errors import Unavailable
from hosts.guest.protocol import ProtocolError, parse_document

_MAX_ANSWER_BYTES = 1024 * 1024
_MARGIN_S = 5.0
"""How much longer than a deadline that the agent keeps we wait for it to say so."""


class AgentSilent(Unavailable):
    """The agent gave no answer; whether it did what was asked is not known."""

    code: ClassVar[str] = "agent_silent"

    def __str__(self) -> str:
        return "The machine's agent does not answer."


class AgentFailed(Unavailable):
    """The agent answered that it could not do what was asked."""

    code: ClassVar[str] = "agent_failed"

    def __init__(self, op: str, reason: str) -> None:
        super().__init__(op, reason)
        self.op = op
        self.reason = reason

    def __str__(self) -> str:
        return f"The machine's agent could not do {self.op}: {self.reason}."


@dataclass(frozen=True)
class AgentState:
    """What `ping` answers."""

    ready: bool
    """Whether the guest's sshd listens too."""
    boot_id: str
    uptime_s: float


class AgentChannel:
    """Asks the agent of one guest; every method raises `AgentSilent` or `AgentFailed`."""

    def __init__(self, path: Path, *, timeout_s: float = 10.0) -> None:
        self._path = path
        self._timeout_s = timeout_s

    def ping(self, *, timeout_s: float | None = None) -> AgentState:
        """Ask whether it lives, and whether it is ready for commands."""
        answer = self._ask("ping", timeout_s=timeout_s)
        uptime_s = answer.get("uptime_s")
        return AgentState(
            ready=answer.get("ready") is True,
            boot_id=str(answer.get("boot_id"))[:100],
            uptime_s=float(uptime_s) if isinstance(uptime_s, int | float) else 0.0,
        )

    def await_ready(self, *, timeout_s: float) -> AgentState:
        """Wait until a guest that boots is ready for commands.

        Raises:
            AgentSilent: it is not, `timeout_s` later.
        """
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                state = self.ping(timeout_s=min(left_s, self._timeout_s))
            except AgentSilent:
                time.sleep(0.05)  # its socket may not be there yet
                continue
            if state.ready:
                return state
            time.sleep(0.05)
        raise AgentSilent

    def set_clock(self, unix_s: float | None = None) -> None:
        """Set the guest's clock, to this machine's where no time is given."""
        self._ask("set_clock", unix_s=time.time() if unix_s is None else unix_s)

    def sync(self) -> None:
        """Have all that was written reach the disk."""
        self._ask("sync", timeout_s=60.0)

    def prepare_stop(self, deadline_s: float) -> None:
        """End all processes and freeze the disk, which is clean once this returns.

        The guest is of no use after it but to be destroyed, or to be woken by `thaw`.
        """
        self._ask("prepare_stop", timeout_s=deadline_s + _MARGIN_S, deadline_s=deadline_s)

    def freeze(self, deadline_s: float) -> None:
        """Write all out and hold the guest's writes; it thaws by itself at the deadline."""
        self._ask("freeze", timeout_s=deadline_s + _MARGIN_S, deadline_s=deadline_s)

    def thaw(self) -> None:
        """Let writes go on; fine when they do."""
        self._ask("thaw")

    def grow(self, size_bytes: int | None = None) -> int:
        """Enlarge the root file system, to twice what it is or to a size; returns the size."""
        params = {} if size_bytes is None else {"size_bytes": size_bytes}
        answer = self._ask("grow", timeout_s=300.0, **params)
        grown_bytes = answer.get("size_bytes")
        return grown_bytes if isinstance(grown_bytes, int) else 0

    def stats(self) -> dict[str, Any]:
        """Memory, processor and disk figures, unchecked."""
        return self._ask("stats")

    def _ask(self, op: str, *, timeout_s: float | None = None, **params: Any) -> dict[str, Any]:
        request_id = secrets.token_hex(8)
        request = json.dumps({"id": request_id, "op": op, **params}).encode()
        deadline_s = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        try:
            with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
                connection.settimeout(max(0.01, deadline_s - time.monotonic()))
                connection.connect(str(self._path))
                # The first newline ends what half a request may have left behind.
                connection.sendall(b"\n" + request + b"\n")
                answer = _answer_to(request_id, connection, deadline_s)
        except OSError as error:
            raise AgentSilent from error
        if answer.get("ok") is not True:
            raise AgentFailed(op, _reason(answer))
        return answer


def _answer_to(request_id: str, connection: socket.socket, deadline_s: float) -> dict[str, Any]:
    for line in _lines(connection, deadline_s):
        try:
            answer = parse_document(line)
        except ProtocolError:
            continue  # the tail of an answer to someone else
        if answer.get("id") == request_id:
            return answer
    raise AgentSilent


def _lines(connection: socket.socket, deadline_s: float) -> Iterator[bytes]:
    """Yield lines until the deadline, the end of the connection, or too much of it."""
    pending = b""
    received_bytes = 0
    while received_bytes <= 4 * _MAX_ANSWER_BYTES and len(pending) <= _MAX_ANSWER_BYTES:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return
        connection.settimeout(left_s)
        data = connection.recv(65536)
        if not data:
            return
        received_bytes += len(data)
        *lines, pending = (pending + data).split(b"\n")
        yield from lines


def _reason(answer: dict[str, Any]) -> str:
    error = answer.get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return str(message)[:500]
