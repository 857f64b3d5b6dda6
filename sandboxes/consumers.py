"""The console's WebSockets: the live list, and the terminal.

The terminal speaks bytes in binary frames (what is typed, what the program writes) and JSON
in text frames:

    page → {"type": "resize", "rows", "cols"}    {"type": "ack", "bytes"}    {"type": "end"}
    us   → {"type": "attached", "replay_bytes"}    what follows is the shell from its start
           {"type": "taken", "bytes"}              so much input has reached the shell
           {"type": "status", "state", …}          {"type": "waking", "steps"}
           {"type": "notice" | "failed" | "exit", …}

Both directions have a window. The page may have `INPUT_WINDOW_BYTES` on the way that were
not yet `taken`; we have `OUTPUT_WINDOW_BYTES` on the way that the page did not yet `ack`. So
a paste of any size stays whole, a program that writes faster than a page can draw waits, and
`receive` never does: an `ack` that queued behind a full input would be a deadlock.
"""

import asyncio
import contextlib
import json
import logging
import re
import time
from typing import Any
from urllib.parse import parse_qs
from uuid import UUID

from channels.generic.websocket import AsyncWebsocketConsumer

from billing.pricing import memory_price_per_hour
from common.api.database import run_db
from common.errors import DomainError
from common.units import KiB
from hosts.guest import protocol
from hosts.link import AgentError, AgentStream, GuestLink, LinkDown
from sandboxes import access, services
from sandboxes.errors import Gone, WakingUp
from sandboxes.events import Changes, team_group, watching
from sandboxes.models import Sandbox
from sandboxes.progress import steps_of
from sandboxes.templatetags.console import exact_money
from sandboxes.visitors import Standing, member_of, standing_of

log = logging.getLogger(__name__)

State = Sandbox.State

SHELL_ENDED = 4000
ASLEEP = 4001
FAILED = 4002
BAD_REQUEST = 4400
SIGNED_OUT = 4401
NOT_ALLOWED = 4403
NOT_FOUND = 4404
OUR_FAULT = 4500

# A session that has ended, or a role that was taken away, closes its sockets within this.
CHECK_S = 3.0
RETRY_LINK_S = 1.0
# A guest that is not there by then is given up on; it may be a slow machine's first boot.
WAKE_LIMIT_S = 300.0

INPUT_WINDOW_BYTES = 256 * KiB
# The page counts its own window; this is what we take before we call it broken.
MAX_QUEUED_INPUT_BYTES = 2 * INPUT_WINDOW_BYTES
OUTPUT_WINDOW_BYTES = 512 * KiB
TAKEN_STEP_BYTES = 16 * KiB
MAX_CONTROL_CHARS = 1000

SHELL_NAME = re.compile(r"[a-z0-9]{1,16}")
MAX_SIDE = 1000

# Whichever shell the image has; the login files of it set the prompt and the path.
LOGIN_SHELL = ["/bin/sh", "-c", 'exec "$(command -v bash || command -v sh)" -l']


class Ended(Exception):
    """The socket is to be closed with this code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class LiveConsumer(AsyncWebsocketConsumer):
    """Says which of a team's sandboxes changed; the page then asks for what it shows."""

    async def connect(self) -> None:
        await self.accept()
        self._checks: asyncio.Task[None] | None = None
        self._team_id: UUID = self.scope["url_route"]["kwargs"]["team_id"]
        if not await self._is_welcome():
            await self.close(NOT_FOUND)
            return
        await self.channel_layer.group_add(team_group(self._team_id), self.channel_name)
        await self._say({"type": "ready"})
        self._checks = asyncio.create_task(self._keep_checking())

    async def disconnect(self, code: int) -> None:
        if self._checks is not None:
            self._checks.cancel()
        await self.channel_layer.group_discard(team_group(self._team_id), self.channel_name)

    async def sandbox_changed(self, event: dict[str, str]) -> None:
        """Pass a hint on."""
        await self._say({"type": "changed", "sandbox_id": event["sandbox_id"]})

    async def _keep_checking(self) -> None:
        while await self._is_welcome():
            await asyncio.sleep(10 * CHECK_S)
        await self.close(SIGNED_OUT)

    async def _is_welcome(self) -> bool:
        member = await run_db(member_of, self.scope["session"].session_key, self._team_id)
        return member is not None

    async def _say(self, message: dict[str, object]) -> None:
        await self.send(text_data=json.dumps(message))


class TerminalConsumer(AsyncWebsocketConsumer):
    """One page's view of one shell. The shell is in the guest and outlives it."""

    async def connect(self) -> None:
        await self.accept()
        self._task: asyncio.Task[None] | None = None
        self._stream: AgentStream | None = None
        self._link: GuestLink | None = None
        self._input: asyncio.Queue[bytes] = asyncio.Queue()
        self._queued_bytes = 0
        self._unacked_bytes = 0
        self._acked = asyncio.Event()
        self._told: dict[str, object] = {}
        self.sandbox_id: str = self.scope["url_route"]["kwargs"]["sandbox_id"]

        asked = parse_qs(self.scope["query_string"].decode("latin-1"))
        self._size = _size(asked.get("rows", [""])[0], asked.get("cols", [""])[0]) or (24, 80)
        self._wakes = asked.get("wake") == ["1"]
        self._shell = asked.get("shell", ["1"])[0]
        if not SHELL_NAME.fullmatch(self._shell):
            await self.close(BAD_REQUEST)
            return
        self._task = asyncio.create_task(self._serve())

    async def disconnect(self, code: int) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def receive(
        self, text_data: str | None = None, bytes_data: bytes | None = None
    ) -> None:
        """Queue what is typed, or act on a control frame. Never waits for the guest."""
        if bytes_data is not None:
            self._queued_bytes += len(bytes_data)
            if self._queued_bytes > MAX_QUEUED_INPUT_BYTES:
                await self.close(BAD_REQUEST)
                return
            self._input.put_nowait(bytes_data)
            return
        try:
            await self._control(_control_frame(text_data or ""))
        except (KeyError, TypeError, ValueError):
            await self.close(BAD_REQUEST)

    async def _control(self, frame: dict[str, Any]) -> None:
        match frame["type"]:
            case "resize":
                size = _size(frame["rows"], frame["cols"])
                if size is not None:
                    self._size = size
                    await self._resize()
            case "ack":
                self._unacked_bytes = max(0, self._unacked_bytes - int(frame["bytes"]))
                self._acked.set()
            case "end":
                await self._end_shell()
            case _:
                raise ValueError("an unknown control frame")

    async def _serve(self) -> None:
        """Bring the page to its shell, again and again, until one of them is done."""
        code = OUR_FAULT
        try:
            async with watching(self.sandbox_id) as changes:
                while True:
                    await self._serve_once(changes)
        except Ended as ended:
            code = ended.code
        except Gone:
            code = NOT_FOUND
        except DomainError as error:
            await self._say({"type": "failed", "text": str(error)})
            code = FAILED
        except AgentError as error:
            await self._say({"type": "failed", "text": f"No shell: {error.message}"})
            code = FAILED
        except asyncio.CancelledError:
            raise
        except Exception:
            # A task's error is seen by nobody else, and the page must not wait for ever.
            log.exception("the terminal of %s broke", self.sandbox_id)
        await self.close(code)

    async def _serve_once(self, changes: Changes) -> None:
        standing = await self._look()
        if standing.sandbox.state in (State.PAUSED, State.PAUSING):
            if not self._wakes:
                raise Ended(ASLEEP)
            self._wakes = False  # one press of a button is one wake
            await run_db(services.resume_sandbox, sandbox=standing.sandbox)
        link, generation = await self._reach(standing, changes)
        try:
            await self._attend(link, generation, standing, changes)
        except LinkDown:
            # The guest may have been paused, or died, or only its connection broke.
            await asyncio.sleep(RETRY_LINK_S)

    async def _look(self) -> Standing:
        """Read how things stand now, and tell the page what has changed.

        Raises:
            Ended: the page may not be here (any more).
        """
        session_key = self.scope["session"].session_key
        standing = await run_db(standing_of, session_key, self.sandbox_id)
        if standing is None:
            raise Ended(SIGNED_OUT if self._told else NOT_FOUND)
        if not standing.may("sandbox:write"):
            raise Ended(NOT_ALLOWED)
        sandbox = standing.sandbox
        price = memory_price_per_hour(sandbox.memory_mib)
        await self._tell(
            {
                "type": "status",
                "state": sandbox.state,
                "price_per_hour": exact_money(price),
                "window_bytes": INPUT_WINDOW_BYTES,
            }
        )
        return standing

    async def _reach(self, standing: Standing, changes: Changes) -> tuple[GuestLink, int]:
        """Wait for the guest, and show the page how far it is."""
        began = time.monotonic()
        times: dict[str, float] = {}
        team = standing.sandbox.team
        reach = asyncio.create_task(access.guest_of(self.sandbox_id, team))
        try:
            while True:
                standing = await self._look()
                await self._tell_steps(standing.sandbox, times, time.monotonic() - began)
                if reach.done():
                    try:
                        return reach.result(), standing.sandbox.runtime_generation
                    except WakingUp:
                        if time.monotonic() - began > WAKE_LIMIT_S:
                            raise
                        reach = asyncio.create_task(access.guest_of(self.sandbox_id, team))
                await _first_of(reach, changes, 1.0)
        finally:
            reach.cancel()

    async def _tell_steps(
        self, sandbox: Sandbox, times: dict[str, float], elapsed_s: float
    ) -> None:
        steps = steps_of(sandbox)
        for step in steps:
            if step.progress == "done":
                times.setdefault(step.label, elapsed_s)
        if steps:
            shown = [
                {
                    "label": step.label,
                    "progress": step.progress,
                    "at_s": round(times.get(step.label, elapsed_s), 1),
                }
                for step in steps
            ]
            await self._say(
                {"type": "waking", "steps": shown, "elapsed_s": round(elapsed_s, 1)}
            )

    async def _attend(
        self, link: GuestLink, generation: int, standing: Standing, changes: Changes
    ) -> None:
        """Carry bytes both ways until the shell, the guest or the page's right to it ends."""
        self._link = link
        async with await self._open_shell(link, standing) as stream:
            self._stream = stream
            await self._resize()
            pumps = [
                asyncio.create_task(self._carry_output(stream)),
                asyncio.create_task(self._carry_input(stream)),
            ]
            both = asyncio.gather(*pumps)
            try:
                while not both.done():
                    await _first_of(both, changes, CHECK_S)
                    sandbox = (await self._look()).sandbox
                    if sandbox.state != State.RUNNING:
                        return
                    if sandbox.runtime_generation != generation:
                        return
                await both
            finally:
                self._stream = self._link = None
                both.cancel()
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, both, return_exceptions=True)

    async def _open_shell(self, link: GuestLink, standing: Standing) -> AgentStream:
        """Attach to the shell of this name, or start it. What it wrote comes first."""
        shell_id = self._shell_id(standing)
        rows, cols = self._size
        create: dict[str, Any] = {
            "id": shell_id,
            "argv": LOGIN_SHELL,
            "env": {"COLORTERM": "truecolor"},
            "pty": {"rows": rows, "cols": cols},
            "hidden": True,
        }
        answer = await link.call("context.create", **create)
        if not answer["context"]["running"]:
            # The same name, but that shell has ended: this is a new one.
            await link.call("context.delete", id=shell_id)
            await link.call("context.create", **create)
        stream = await link.stream("context.attach", id=shell_id, **{"from": "start"})
        context = stream.opening["context"]
        replay_bytes = int(context["stdout_bytes"]) - int(context["dropped_bytes"])
        self._unacked_bytes = 0
        await self._say({"type": "attached", "replay_bytes": max(0, replay_bytes)})
        return stream

    def _shell_id(self, standing: Standing) -> str:
        self._own_shell_id = f"term-{standing.membership.user_id.hex[:12]}-{self._shell}"
        return self._own_shell_id

    async def _carry_output(self, stream: AgentStream) -> None:
        while (frame := await stream.recv()) is not None:
            if frame.kind == protocol.JSON:
                await self._shell_event(frame.document())
                continue
            while self._unacked_bytes >= OUTPUT_WINDOW_BYTES:
                self._acked.clear()
                await self._acked.wait()
            self._unacked_bytes += len(frame.payload)
            await self.send(bytes_data=frame.payload)
        raise LinkDown("The guest's agent hung up.")

    async def _shell_event(self, event: dict[str, Any]) -> None:
        if event.get("event") == "exit":
            context = event.get("context") or {}
            await self._say({"type": "exit", "exit_code": context.get("exit_code")})
            raise Ended(SHELL_ENDED)
        error = event.get("error") or {}
        await self._say({"type": "notice", "text": str(error.get("message", ""))[:300]})

    async def _carry_input(self, stream: AgentStream) -> None:
        taken_bytes = 0
        while True:
            data = await self._input.get()
            await stream.send(protocol.INPUT, data)
            self._queued_bytes -= len(data)
            taken_bytes += len(data)
            if taken_bytes >= TAKEN_STEP_BYTES:
                await self._say({"type": "taken", "bytes": taken_bytes})
                taken_bytes = 0

    async def _resize(self) -> None:
        if self._stream is None:
            return
        rows, cols = self._size
        document = {"op": "resize", "rows": rows, "cols": cols}
        with contextlib.suppress(LinkDown):  # whoever reads the stream finds out too
            await self._stream.send(protocol.JSON, json.dumps(document).encode())

    async def _end_shell(self) -> None:
        """End the shell and all that runs in it: its tab was closed."""
        if self._link is not None:
            with contextlib.suppress(LinkDown, AgentError):
                await self._link.call("context.delete", id=self._own_shell_id)

    async def _tell(self, message: dict[str, object]) -> None:
        """Say what the page does not know yet."""
        if message != self._told:
            self._told = message
            await self._say(message)

    async def _say(self, message: dict[str, object]) -> None:
        await self.send(text_data=json.dumps(message))


async def _first_of(work: "asyncio.Future[Any]", changes: Changes, timeout_s: float) -> None:
    """Return when the work is done, the sandbox has changed, or the time is up."""
    change = asyncio.create_task(changes.wait(timeout_s))
    try:
        await asyncio.wait({work, change}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        change.cancel()
        await asyncio.gather(change, return_exceptions=True)


def _control_frame(text: str) -> dict[str, Any]:
    if len(text) > MAX_CONTROL_CHARS:
        raise ValueError("too long a control frame")
    frame = json.loads(text)
    if not isinstance(frame, dict):
        raise TypeError("no JSON object")
    return frame


def _size(rows: object, cols: object) -> tuple[int, int] | None:
    """Return rows and columns, if a terminal can have so many."""
    try:
        sides = int(str(rows)), int(str(cols))
    except ValueError:
        return None
    return sides if all(0 < side <= MAX_SIDE for side in sides) else None
