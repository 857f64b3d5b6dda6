"""A small synchronous QMP client for the storage daemon's monitor.

Source: QEMU, docs/interop/qmp-spec.rst.
"""

import json
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from common.units import MiB
from hosts.volumes.errors import DaemonFailed

TIMEOUT_S = 60
"""For one command. Adding a node may wait for a flush to the local disk."""

MAX_ANSWER_BYTES = 4 * MiB

_ID_BYTES = 4


class QmpRefused(DaemonFailed):
    """The daemon understood a command and answered with an error."""


class Qmp:
    """One connection to a monitor, which serves one client at a time."""

    def __init__(self, path: Path, *, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._buffer = b""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(str(path))
            self._receive(time.monotonic() + timeout_s)  # the greeting
            self.execute("qmp_capabilities")
        except OSError as error:
            self._socket.close()
            raise DaemonFailed(f"No storage daemon answers: {error.strerror}.") from error
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    def execute(self, command: str, **arguments: Any) -> Any:
        """Run a command and give back what it returns; events are passed over.

        Raises:
            QmpRefused: the daemon says that it cannot be done.
            DaemonFailed: no answer; whether it was done is unknown.
        """
        return self.execute_all([(command, arguments)])[0]

    def execute_all(self, commands: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Any]:
        """Run commands one after the other without waiting in between.

        Those after one that is refused are carried out nevertheless.

        Raises:
            QmpRefused: the first of those that cannot be done.
            DaemonFailed: as `execute` has it.
        """
        deadline = time.monotonic() + self._timeout_s
        # What an earlier client gave up waiting for may be answered to this one.
        mine = secrets.token_hex(_ID_BYTES)
        requests = b""
        for number, (command, arguments) in enumerate(commands):
            request = {"execute": command, "id": f"{mine}-{number}"}
            if arguments:
                request["arguments"] = _dashed(arguments)
            # The daemon reads byte by byte: no spaces.
            requests += json.dumps(request, separators=(",", ":")).encode() + b"\n"
        try:
            self._socket.sendall(requests)
            answers = [
                self._answer_to(f"{mine}-{number}", deadline) for number in range(len(commands))
            ]
        except OSError as error:
            raise DaemonFailed(f"No answer to {commands[0][0]}: {error}.") from error
        for (command, _), answer in zip(commands, answers, strict=True):
            if "error" in answer:
                raise QmpRefused(f"{command}: {answer['error'].get('desc')}")
        return [answer["return"] for answer in answers]

    def _answer_to(self, name: str, deadline: float) -> dict[str, Any]:
        """Wait for the answer to a request; events and answers to others are passed over."""
        while True:
            answer = self._receive(deadline)
            if answer.get("id", name) == name and ("error" in answer or "return" in answer):
                return answer

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or len(self._buffer) > MAX_ANSWER_BYTES:
                raise DaemonFailed("A storage daemon's monitor does not answer.")
            self._socket.settimeout(left_s)
            received = self._socket.recv(65536)
            if not received:
                raise DaemonFailed("A storage daemon closed its monitor.")
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


def _dashed(value: Any) -> Any:
    """Spell keyword arguments as QMP does: `node_name` is `node-name`."""
    if isinstance(value, dict):
        return {key.replace("_", "-"): _dashed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_dashed(inner) for inner in value]
    return value
