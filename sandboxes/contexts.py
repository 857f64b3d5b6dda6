"""Commands in a sandbox: started, followed and ended through its guest's agent.

The agent is the truth about contexts; nothing of them is kept here, so they survive a
restart of the web process. It runs in the guest, so what it says is checked and bounded.
"""

import asyncio
import base64
import codecs
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

from accounts.models import Team
from common.units import MiB
from hosts.guest import protocol
from hosts.guest.protocol import Frame
from hosts.link import AgentError, AgentStream, GuestLink, LinkDown
from sandboxes import access, errors
from sandboxes.models import ID_ALPHABET

# What one answer carries of each stream; the rest is read, so that the command is not held
# up, and dropped with a flag.
MAX_OUTPUT_BYTES = 16 * MiB

# Tries to start or follow a command over a link that breaks.
LINK_TRIES = 4
RETRY_S = 0.5

# The agent waits 5 s for a process to obey SIGTERM before it kills it.
DELETE_TIMEOUT_S = 20.0

# For how long a program may leave its full input unread before a writer gives up.
INPUT_TIMEOUT_S = 30.0

CONTEXT_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Linux takes no longer single string in argv or environ (MAX_ARG_STRLEN), its end included.
MAX_STRING_BYTES = 128 * 1024 - 1
# Both together, below the kernel's limit of a quarter of the stack (2 MiB), and far below
# the frame that carries them.
MAX_TOTAL_BYTES = 768 * 1024
MAX_STRINGS = 4096

STATES = frozenset(("created", "starting", "running", "paused", "stopped", "killed", "crashed"))

SIGNALS = frozenset(
    ("INT", "TERM", "KILL", "HUP", "QUIT", "USR1", "USR2", "WINCH", "STOP", "CONT")
)
MAX_SIGNAL = 64

_REFUSALS: dict[str, type[errors.ContextRefused]] = {
    refusal.code: refusal
    for refusal in (
        errors.InvalidContextRequest,
        errors.ContextNotFound,
        errors.ProcessFinished,
        errors.ProcessNotRunning,
        errors.InputBufferFull,
        errors.PtyUnavailable,
        errors.ContextNotCreated,
    )
}

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """What to run, under an id that we choose, so that asking twice starts it once."""

    id: str
    argv: list[str]
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    pty: Mapping[str, int] | None = None
    stdin_is_open: bool = False
    ttl_s: int | None = None
    idle_timeout_s: int | None = None
    is_hidden: bool = False

    def params(self) -> dict[str, Any]:
        """Return it as the agent takes it."""
        params: dict[str, Any] = {
            "id": self.id,
            "argv": self.argv,
            "env": dict(self.env),
            "stdin": "open" if self.stdin_is_open else "closed",
        }
        optional = {
            "cwd": self.cwd,
            "pty": dict(self.pty) if self.pty else None,
            "ttl_s": self.ttl_s,
            "idle_timeout_s": self.idle_timeout_s,
            "hidden": self.is_hidden or None,
        }
        return params | {name: value for name, value in optional.items() if value is not None}


class Output:
    """What a context wrote, in the order that it came, each stream bounded."""

    def __init__(self) -> None:
        self._frames: list[Frame] = []
        self._kept_bytes = dict.fromkeys(protocol.OUTPUT_KINDS, 0)
        self.is_truncated = False

    def add(self, frame: Frame) -> None:
        """Keep the frame, or what still fits of it."""
        room = MAX_OUTPUT_BYTES - self._kept_bytes[frame.kind]
        if len(frame.payload) > room:
            self.is_truncated = True
            frame = Frame(frame.kind, frame.payload[:room])
        if frame.payload:
            self._kept_bytes[frame.kind] += len(frame.payload)
            self._frames.append(frame)

    def of(self, kind: bytes) -> bytes:
        """Return the bytes of one stream."""
        return b"".join(frame.payload for frame in self._frames if frame.kind == kind)

    def text(self) -> str:
        """Return all streams as one text, interleaved as they came."""
        decoders = {kind: TextDecoder() for kind in protocol.OUTPUT_KINDS}
        pieces = [decoders[frame.kind].feed(frame.payload) for frame in self._frames]
        return "".join(pieces + [decoder.end() for decoder in decoders.values()])


class TextDecoder:
    """Turns bytes into text piece by piece; a character that is cut in two stays whole."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """Return the text that is now complete."""
        return self._decoder.decode(data)

    def end(self) -> str:
        """Return a replacement mark where the stream ended inside a character."""
        return self._decoder.decode(b"", final=True)


def new_context_id() -> str:
    """Return a fresh id, `ctx-<8>`."""
    return "ctx-" + "".join(secrets.choice(ID_ALPHABET) for _ in range(8))


async def start_context(sandbox_id: str, team: Team, command: Command) -> dict[str, Any]:
    """Start the command and return its context as clients see it, without waiting."""

    async def start(link: GuestLink) -> dict[str, Any]:
        answer = await link.call("context.create", **command.params())
        return body_of(_context_in(answer))

    return await _started_once(sandbox_id, team, start)


async def run_context(sandbox_id: str, team: Team, command: Command) -> dict[str, Any]:
    """Run the command to its end and return its context with all that it wrote.

    A caller that is cancelled leaves the command running.
    """
    was_asked = False

    async def run(link: GuestLink) -> dict[str, Any]:
        nonlocal was_asked
        # After a broken link the agent is asked for the same id: it starts it if it never
        # heard of it, and else gives what it has kept.
        op = "context.attach" if was_asked else "context.run"
        params = {"id": command.id, "from": "start"} if was_asked else command.params()
        was_asked = True
        try:
            stream = await link.stream(op, **params)
        except AgentError as error:
            if op != "context.attach" or error.code != protocol.CONTEXT_NOT_FOUND:
                raise
            stream = await link.stream("context.run", **command.params())
        async with stream:
            return await _follow(stream)

    return await _started_once(sandbox_id, team, run)


async def _started_once(
    sandbox_id: str, team: Team, ask: Callable[[GuestLink], Awaitable[T]]
) -> T:
    """Ask a guest to start something, again when the link breaks, but only the same guest.

    Another one, after a pause or a crash, does not know whether the command has run.
    """
    asked_of: str | None = None
    for left in reversed(range(LINK_TRIES)):
        link = await access.guest_of(sandbox_id, team)
        if asked_of not in (None, link.endpoint.key):
            raise LinkDown("The sandbox restarted while the command ran.")
        asked_of = link.endpoint.key
        try:
            return await ask(link)
        except AgentError as error:
            raise refusal_of(error) from error
        except LinkDown:
            if not left:
                raise
            await asyncio.sleep(RETRY_S)
    raise AssertionError("the last try returns or raises")


async def _follow(stream: AgentStream) -> dict[str, Any]:
    """Read a stream to its end and return the context as it then is, with its output."""
    output = Output()
    while (frame := await stream.recv()) is not None:
        if frame.kind in protocol.OUTPUT_KINDS:
            output.add(frame)
        elif frame.kind == protocol.JSON:
            event = frame.document()
            if event.get("event") in ("exit", "end"):
                context = event.get("context") or _context_in(stream.opening)
                return body_of(context, output)
    raise LinkDown("The guest's agent hung up before the command ended.")


async def show_context(sandbox_id: str, team: Team, context_id: str) -> dict[str, Any]:
    """Return a context with the output that is kept of it."""

    async def show(link: GuestLink) -> dict[str, Any]:
        async with await link.stream("context.output", id=context_id) as stream:
            return await _follow(stream)

    return await _asked(sandbox_id, team, show, context_id=context_id)


async def list_contexts(sandbox_id: str, team: Team) -> list[dict[str, Any]]:
    """Return the contexts of clients, oldest first, without their output."""

    async def show_all(link: GuestLink) -> list[dict[str, Any]]:
        listed = (await link.call("context.list")).get("contexts")
        contexts = [one for one in listed or [] if isinstance(one, dict)]
        return [body_of(one) for one in contexts if one.get("hidden") is not True]

    return await _asked(sandbox_id, team, show_all)


async def delete_context(sandbox_id: str, team: Team, context_id: str) -> None:
    """End a context's process group and forget it."""
    await _tell(sandbox_id, team, "context.delete", context_id, timeout_s=DELETE_TIMEOUT_S)


async def signal_context(sandbox_id: str, team: Team, context_id: str, name: str) -> None:
    """Send a signal, named as `parse_signal` returns it, to a context's process group."""
    await _tell(sandbox_id, team, "context.signal", context_id, signal=name)


async def resize_context(
    sandbox_id: str, team: Team, context_id: str, *, rows: int, cols: int
) -> None:
    """Give a context's terminal another size."""
    await _tell(sandbox_id, team, "context.resize", context_id, rows=rows, cols=cols)


async def write_to_context(sandbox_id: str, team: Team, context_id: str, data: bytes) -> None:
    """Write exact bytes to a context's standard input or terminal."""

    async def write(link: GuestLink) -> None:
        async with await link.stream("context.input", id=context_id) as stream:
            if data:
                await stream.send(protocol.INPUT, data)
            await stream.send(protocol.JSON, b'{"event":"end"}')
            await _acceptance(stream)

    await _asked(sandbox_id, team, write, context_id=context_id)


async def _acceptance(stream: AgentStream) -> None:
    """Wait until the agent says that it took the input, or why it did not."""
    async with asyncio.timeout(INPUT_TIMEOUT_S):
        while (frame := await stream.recv()) is not None:
            event = frame.document()
            if event.get("event") == "accepted":
                return
            if event.get("event") == "error":
                raise error_in(event)
    raise LinkDown("The guest's agent hung up before it took the input.")


def error_in(event: Mapping[str, Any]) -> AgentError:
    """Return the refusal that an event of a conversation carries."""
    error = event.get("error")
    fields = error if isinstance(error, dict) else {}
    return AgentError(_text(fields.get("code")), _text(fields.get("message")))


async def _tell(sandbox_id: str, team: Team, op: str, context_id: str, **params: Any) -> None:
    async def tell(link: GuestLink) -> None:
        await link.call(op, id=context_id, **params)

    await _asked(sandbox_id, team, tell, context_id=context_id)


async def _asked(
    sandbox_id: str,
    team: Team,
    ask: Callable[[GuestLink], Awaitable[T]],
    *,
    context_id: str | None = None,
) -> T:
    link = await access.guest_of(sandbox_id, team)
    if context_id is not None and CONTEXT_ID.fullmatch(context_id) is None:
        raise errors.ContextNotFound("No such context.")
    try:
        return await ask(link)
    except AgentError as error:
        raise refusal_of(error) from error
    except TimeoutError as error:
        raise errors.InputBufferFull("The process does not read its input.") from error


def refusal_of(error: AgentError) -> errors.ContextRefused:
    """Return what an agent's refusal is to a client; an unknown code is a failed creation."""
    return _REFUSALS.get(error.code, errors.ContextNotCreated)(error.message or error.code)


def parse_signal(text: str) -> str:
    """Return a signal's name without SIG, or its number, as the agent takes it.

    Raises:
        ValueError: there is no such signal.
    """
    name = text.strip().upper().removeprefix("SIG")
    if name in SIGNALS:
        return name
    if name.isascii() and name.isdigit() and len(name) <= len(str(MAX_SIGNAL)):
        number = int(name)
        if 1 <= number <= MAX_SIGNAL:
            return str(number)
    names = ", ".join(sorted(SIGNALS))
    raise ValueError(f"It is one of {names}, or a number from 1 to {MAX_SIGNAL}.")


def body_of(context: Mapping[str, Any], output: Output | None = None) -> dict[str, Any]:
    """Return a context as clients see it; what is not known of it is left out."""
    state = context.get("state")
    body: dict[str, Any] = {
        "id": _text(context.get("id")),
        "type": "cmd",
        "running": context.get("running") is True,
        "paused": context.get("paused") is True,
        "state": state if state in STATES else "crashed",
        "created_at": _instant(context.get("created_unix_s")) or "1970-01-01T00:00:00Z",
        "env_vars": _texts(context.get("env")),
        "command": [_text(part) for part in _list(context.get("argv"))],
    }
    optional = {
        "cwd": _text(context.get("cwd")) or None,
        "finished_at": _instant(context.get("finished_unix_s")),
        "exit_code": _integer(context.get("exit_code")),
        "signal": _integer(context.get("signal")),
        "pid": _integer(context.get("pid")),
        "timed_out": True if context.get("timed_out") is True else None,
        "reason": _reason(context),
    }
    body |= {name: value for name, value in optional.items() if value is not None}
    if output is not None:
        body |= _output_body(context, output)
    return body


def _reason(context: Mapping[str, Any]) -> str | None:
    """Return why a context was ended by something other than itself."""
    if context.get("oom_killed") is True:
        return "The sandbox ran out of memory and its kernel killed the process."
    if context.get("timed_out") is True:
        return "Its ttl_sec or idle_timeout_sec was over."
    return None


def _output_body(context: Mapping[str, Any], output: Output) -> dict[str, Any]:
    dropped_bytes = _integer(context.get("dropped_bytes")) or 0
    body: dict[str, Any] = {"output_raw": output.text()}
    if not context.get("pty"):
        body |= _stream_body("stdout", output.of(protocol.STDOUT))
        body |= _stream_body("stderr", output.of(protocol.STDERR))
    if output.is_truncated or _lost(context, output):
        body |= {"truncated": True, "dropped_bytes": dropped_bytes}
    return body


def _lost(context: Mapping[str, Any], output: Output) -> bool:
    """Say whether the context wrote more than arrived here."""
    kinds = (protocol.STDOUT, protocol.STDERR, protocol.PTY)
    arrived = sum(len(output.of(kind)) for kind in kinds)
    counts = (_integer(context.get(f"{name}_bytes")) or 0 for name in ("stdout", "stderr"))
    return arrived < sum(counts)


def _stream_body(name: str, data: bytes) -> dict[str, str]:
    """Return a stream as text and, where text cannot carry it, exactly as well."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        exact = base64.b64encode(data).decode()
        return {name: data.decode("utf-8", "replace"), f"{name}_base64": exact}


def _context_in(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    context = answer.get("context")
    if not isinstance(context, dict):
        raise LinkDown("The guest's agent gave no proper answer.")
    return context


def _text(value: object) -> str:
    # Lone surrogates, which JSON can carry, could not be encoded again.
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""


def _texts(value: object) -> dict[str, str]:
    return {_text(k): _text(v) for k, v in value.items()} if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _instant(unix_s: object) -> str | None:
    if not isinstance(unix_s, int | float) or isinstance(unix_s, bool):
        return None
    try:
        return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return None
