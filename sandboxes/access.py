"""The way to a sandbox's guest and to its files, woken and waited for where that is allowed.

    state                    a guest is wanted                      files are wanted
    ───────────────────────  ─────────────────────────────────────  ──────────────────────
    running                  its link                               its guest's SFTP
    starting, resuming       wait for running                       wait for running
    paused                   resume it, where auto_resume is on     its host opens them
    pausing                  wait for paused, then as above         wait for paused
    failed                   503                                    503
    terminating, deleted     404                                    404

However many callers arrive at once, `services.resume_sandbox` boots one guest; the others
wait for it. Nobody holds a thread or a database connection while waiting.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

import asyncssh
from django.conf import settings

from accounts.models import Team
from common.api.database import run_db
from hosts.link import GateEndpoint, GuestEndpoint, GuestLink, LinkDown, Links
from hosts.models import Host, Volume
from sandboxes import moments, services
from sandboxes.errors import FilesLost, Gone, NotRunning, ResumeFailed, WakingUp, WrongState
from sandboxes.events import Changes, watching
from sandboxes.models import Sandbox

# Hints may be lost, so a waiter also looks by itself now and then.
LOOK_AGAIN_S = 2.0

# Opening the files of a paused sandbox takes a tenth of a second; after this, a waiter looks
# whether it still sleeps.
AT_THE_GATE_S = 2.0

# A guest that does not answer may have died, which its host notices within 10 s; asking it
# more often than this only adds to its load.
RETRY_LINK_S = 1.0

SANDBOX_ID = re.compile(r"[a-z0-9-]{1,55}")

State = Sandbox.State
T = TypeVar("T")

_links: WeakKeyDictionary[asyncio.AbstractEventLoop, Links] = WeakKeyDictionary()


def links() -> Links:
    """Return the connections to guests and gates of the running event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _links:
        _links[loop] = Links(asyncssh.read_private_key(settings.PLATFORM_KEY_FILE))
    return _links[loop]


def find_sandbox(sandbox_id: str, team: Team) -> Sandbox:
    """Return the team's sandbox, its hosts and volume along with it.

    Raises:
        Gone: the id is malformed, unknown, deleted, or another team's.
    """
    if SANDBOX_ID.fullmatch(sandbox_id) is None:
        raise Gone
    present = Sandbox.objects.of(team).present()
    try:
        return present.select_related("host", "team", "template", "volume__attached_host").get(
            pk=sandbox_id
        )
    except Sandbox.DoesNotExist:
        raise Gone from None


async def guest_of(sandbox_id: str, team: Team) -> GuestLink:
    """Return a link to the sandbox's guest, connected; a paused one is woken first.

    Raises:
        Gone: there is no such sandbox, or it was deleted meanwhile.
        NotRunning: it is paused and its auto_resume is off.
        WakingUp: it did not run in time; it still may, soon.
        ResumeFailed: it could not be started.
        Refused, Unavailable: what `services.resume_sandbox` raises, such as a quota.
    """
    sandbox = await run_db(find_sandbox, sandbox_id, team)
    if sandbox.state == State.RUNNING:
        try:
            return await links().guest(guest_endpoint(sandbox))
        except LinkDown:
            pass  # paused, replaced or dead since; the wait below finds out
    return await _wait(sandbox_id, team, _Waker().step)


async def files_of(
    sandbox_id: str, team: Team, *, generation: int | None = None
) -> asyncssh.SFTPClient:
    """Return an SFTP session on the sandbox's files, shared: no caller may `exit` it.

    A paused sandbox stays paused: its host opens the committed disk.

    Args:
        generation: a moment of its history, whose files are for reading only: what is written
            to them is lost.

    Raises:
        MomentNotFound, TooManyViews: of a generation.
        Gone: there is no such sandbox, or it was deleted meanwhile.
        WakingUp: it, or its files, were not there in time; they still may be, soon.
        ResumeFailed: it was starting and could not be.
    """
    if generation is not None:
        return await _wait(sandbox_id, team, _MomentOpener(generation).step)
    sandbox, asked = await run_db(_find_or_have_opened, sandbox_id, team)
    opened = await _open_files(sandbox) if asked is None else await _from_the_gate(asked)
    if opened is not None:
        return opened
    return await _wait(sandbox_id, team, _FilesOpener().step)


def guest_endpoint(sandbox: Sandbox) -> GuestEndpoint:
    """Return where the guest of a running sandbox is reached."""
    assert sandbox.host is not None
    assert sandbox.address is not None
    return GuestEndpoint(
        gate=gate_endpoint(sandbox.host),
        address=sandbox.address,
        host_public_key=sandbox.host_public_key,
        key=f"{sandbox.id}:{sandbox.runtime_generation}",
    )


def gate_endpoint(host: Host) -> GateEndpoint:
    """Return where a host's gate is reached."""
    return GateEndpoint(
        host=host.gate_host, port=host.gate_port, public_key=host.gate_public_key
    )


async def _wait(
    sandbox_id: str, team: Team, step: Callable[[Sandbox], Awaitable[T | None]]
) -> T:
    """Take the step at each change of the sandbox, until it returns something."""
    loop = asyncio.get_running_loop()
    until = loop.time() + settings.WAKE_TIMEOUT_S
    async with watching(sandbox_id) as changes:
        while True:
            sandbox = await run_db(find_sandbox, sandbox_id, team)
            found = await step(sandbox)
            if found is not None:
                return found
            if loop.time() >= until:
                raise WakingUp
            await _next_look(changes, sandbox, until - loop.time())


async def _next_look(changes: Changes, sandbox: Sandbox, left_s: float) -> None:
    # Of a running sandbox no change is announced; it was the link that failed.
    pause_s = RETRY_LINK_S if sandbox.state == State.RUNNING else LOOK_AGAIN_S
    await changes.wait(min(pause_s, left_s))


class _Waker:
    """Brings one caller from whatever state the sandbox is in to its guest."""

    def __init__(self) -> None:
        self._saw_a_start = False

    async def step(self, sandbox: Sandbox) -> GuestLink | None:
        match sandbox.state:
            case State.RUNNING:
                return await _link_if_up(sandbox)
            case State.PAUSED:
                await self._resume(sandbox)
            case State.STARTING | State.RESUMING:
                self._saw_a_start = True
            case State.PAUSING:
                self._saw_a_start = False
            case State.FAILED:
                raise ResumeFailed(sandbox.last_error or "its start failed.")
            case _:
                raise Gone
        return None

    async def _resume(self, sandbox: Sandbox) -> None:
        if self._saw_a_start and sandbox.last_error:
            raise ResumeFailed(sandbox.last_error)
        if sandbox.resume_when_paused:
            return  # after a change of its memory it starts by itself
        if not sandbox.auto_resume:
            raise NotRunning
        try:
            await run_db(services.resume_sandbox, sandbox=sandbox)
        except WrongState:
            return  # somebody moved it first; look again
        self._saw_a_start = True


class _FilesOpener:
    """Brings one caller to the sandbox's files, without ever starting a guest."""

    async def step(self, sandbox: Sandbox) -> asyncssh.SFTPClient | None:
        match sandbox.state:
            case State.PAUSED:
                return await self._open_paused(sandbox)
            case State.FAILED:
                raise ResumeFailed(sandbox.last_error or "its start failed.")
            case State.TERMINATING | State.DELETED:
                raise Gone
            case _:
                return await _open_files(sandbox)

    async def _open_paused(self, sandbox: Sandbox) -> asyncssh.SFTPClient | None:
        opened = await _open_files(sandbox)
        if opened is None:
            try:
                await run_db(services.request_files, sandbox=sandbox)
            except WrongState:
                return None
        return opened


def _find_or_have_opened(sandbox_id: str, team: Team) -> tuple[Sandbox, Volume | None]:
    """Return the sandbox, and its volume where a host was just given it for the files."""
    sandbox = find_sandbox(sandbox_id, team)
    if sandbox.state != State.PAUSED or _files_are_open(sandbox.volume):
        return sandbox, None
    try:
        return sandbox, services.request_files(sandbox=sandbox)
    except WrongState:
        return sandbox, None  # somebody moved it first: the long way finds out where to


async def _from_the_gate(volume: Volume) -> asyncssh.SFTPClient | None:
    """Wait at the gate for files that were asked for; None if they are not there in time.

    That is the usual way, and the shortest: `_wait`, which has every other, would first hear
    of it when their host has recorded it. Not for a volume that its host had before: it may
    be closing, with its socket there to the last.
    """
    try:
        async with asyncio.timeout(AT_THE_GATE_S):
            return await _paused_session(volume, patience_s=AT_THE_GATE_S)
    except (LinkDown, TimeoutError):
        return None


class _MomentOpener:
    """Brings one caller to the files of a moment of the sandbox's history."""

    def __init__(self, number: int) -> None:
        self._number = number

    async def step(self, sandbox: Sandbox) -> asyncssh.SFTPClient | None:
        view = await run_db(moments.request_view, sandbox=sandbox, number=self._number)
        if view.error:
            raise ResumeFailed(view.error)
        if not _files_are_open(view.volume):
            return None
        try:
            return await _paused_session(view.volume)
        except LinkDown:
            return None


async def _open_files(sandbox: Sandbox) -> asyncssh.SFTPClient | None:
    """Return the session if it can be had right now."""
    try:
        if sandbox.state == State.RUNNING:
            link = await links().guest(guest_endpoint(sandbox))
            return await link.sftp()
        if sandbox.state == State.PAUSED and _files_are_open(sandbox.volume):
            return await _paused_session(sandbox.volume)
    except LinkDown:
        pass  # it ended, or is not there yet: the caller looks again
    return None


def _files_are_open(volume: Volume) -> bool:
    return volume.attached_for == Volume.Purpose.FILES and volume.files_ready_at is not None


async def _paused_session(
    volume: Volume, *, patience_s: float = 0.0
) -> asyncssh.SFTPClient | None:
    assert volume.attached_host is not None
    session = await links().paused_sftp(
        gate_endpoint(volume.attached_host), volume.id, patience_s=patience_s
    )
    try:
        # Its host closes it when it is idle; this finds that out before anything is changed.
        async with asyncio.timeout(LOOK_AGAIN_S * 5):
            await session.stat(b"/")
    except (asyncssh.SFTPConnectionLost, asyncssh.SFTPNoConnection, TimeoutError):
        return None
    return session


async def _link_if_up(sandbox: Sandbox) -> GuestLink | None:
    try:
        return await links().guest(guest_endpoint(sandbox))
    except LinkDown:
        return None


async def with_files(
    sandbox_id: str,
    team: Team,
    work: Callable[[asyncssh.SFTPClient], Awaitable[T]],
    *,
    generation: int | None = None,
) -> T:
    """Do something with the files that is safe to repeat, again when the session breaks.

    Raises:
        FilesLost: it broke each time.
        Refused, Unavailable: what `files_of` and the work raise.
    """
    for _ in range(2):
        try:
            return await work(await files_of(sandbox_id, team, generation=generation))
        except FilesLost:
            await asyncio.sleep(RETRY_LINK_S / 4)
    return await work(await files_of(sandbox_id, team, generation=generation))
