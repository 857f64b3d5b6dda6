"""An agent on this machine, without a guest around it, and a plain client of its socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from hosts.guest import protocol
from hosts.guest.protocol import Decoder, Frame

_SERVE = """
import resource, sys
from hosts.guest import agent
from hosts.guest.contexts import Contexts
from hosts.guest.loop import Loop
resource.setrlimit(resource.RLIMIT_NOFILE, (8192, 8192))
loop = Loop()
path = "/usr/local/bin:/usr/bin:/bin"
env = {b"PATH": path.encode(), b"HOME": b"/root", b"LANG": b"C.UTF-8"}
contexts = Contexts(loop, env=env, memory_bytes=int(sys.argv[3]), cwd=b"/")
machine = {
    "ping": lambda _, reply: reply({"ok": True, "ready": True, "boot_id": "b", "uptime_s": 1}),
    "sync": lambda _, reply: loop.later(0.3, lambda: reply({"ok": True})) and None,
    "thaw": lambda _, reply: reply({"ok": False, "error": {"message": "it is broken"}}),
}
agent.serve(loop, contexts, machine, socket_path=sys.argv[1], port_path=sys.argv[2] or None)
print("ready", flush=True)
loop.run()
"""


class Agent:
    """A running agent, and shortcuts for asking it."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes]) -> None:
        self.path = path
        self.process = process

    def connect(self, **question: Any) -> Client:
        client = Client(self.path)
        client.say(question)
        return client

    def ask(self, **question: Any) -> dict[str, Any]:
        with self.connect(**question) as client:
            return client.document()

    def run(self, *argv: str, **params: Any) -> Result:
        params.setdefault("id", f"ctx-{time.monotonic_ns()}-{os.urandom(2).hex()}")
        with self.connect(op="context.run", argv=list(argv), **params) as client:
            return client.result()

    def sh(self, script: str, **params: Any) -> Result:
        return self.run("bash", "-c", script, **params)

    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        [line] = [line for line in status.splitlines() if line.startswith("VmRSS")]
        return int(line.split()[1]) * 1024


class Result:
    """What an attached client saw of a context."""

    def __init__(self) -> None:
        self.streams = {kind: bytearray() for kind in protocol.OUTPUT_KINDS}
        self.errors: list[str] = []
        self.context: dict[str, Any] = {}

    @property
    def out(self) -> bytes:
        return bytes(self.streams[protocol.STDOUT])

    @property
    def err(self) -> bytes:
        return bytes(self.streams[protocol.STDERR])

    @property
    def pty(self) -> bytes:
        return bytes(self.streams[protocol.PTY])

    @property
    def code(self) -> int | None:
        code = self.context["exit_code"]
        assert code is None or isinstance(code, int)
        return code


class Client:
    """One connection to an agent's socket."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(60)
        self.socket.connect(str(path))
        self._decoder = Decoder()
        self._frames: list[Frame] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def say(self, document: dict[str, Any]) -> None:
        self.socket.sendall(protocol.encode_document(document))

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        self.socket.sendall(protocol.encode(kind, payload))

    def frame(self) -> Frame | None:
        while not self._frames:
            data = self.socket.recv(1 << 18)
            if not data:
                return None
            self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    def document(self) -> dict[str, Any]:
        frame = self.frame()
        assert frame is not None
        return frame.document()

    def result(self) -> Result:
        answer = self.document()
        assert answer["ok"], answer
        result = Result()
        while (frame := self.frame()) is not None:
            if frame.kind == protocol.JSON:
                document = frame.document()
                if document["event"] == "exit":
                    result.context = document["context"]
                elif document["event"] == "error":
                    result.errors.append(document["error"]["code"])
            else:
                result.streams[frame.kind] += frame.payload
        return result


@contextmanager
def running_agent(
    folder: Path, *, port: str = "", memory_bytes: int = 512 * 1024 * 1024
) -> Iterator[Agent]:
    path = folder / "agent.sock"
    command = [sys.executable, "-c", _SERVE, str(path), port, str(memory_bytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield Agent(path, process)
        finally:
            process.kill()
