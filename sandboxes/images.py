"""A sandbox's or snapshot's disk as one qcow2 file, streamed while it is read.

The web process has neither keys nor disks: a host reads the generation and sends the file
through its gate, and here it is passed on.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from uuid import UUID

import asyncssh
from django.db import transaction
from django.http import StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.utils import timezone

from accounts.services import Doer, record_event
from common.api.database import run_db
from common.errors import Unavailable
from hosts.link import LinkDown
from hosts.models import Generation, Host
from hosts.services import keep_generation
from sandboxes import access, actors, cuts, snapshots
from sandboxes.models import Cut, Sandbox, Snapshot
from sandboxes.services import held_snapshot, host_for_files, locked

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
RETRY_S = 0.25
# All of the index is read before the first byte is sent.
COUNT_TIMEOUT_S = 600.0
PIECE_BYTES = 256 * 1024
# The generation is kept from being given up for as long as somebody takes it.
KEEP_EVERY_S = 60.0


class ImageUnavailable(Unavailable):
    """No host sends the file now."""

    code = "unavailable"
    retry_after_s = 5

    def __str__(self) -> str:
        return "No host could move the image in time. Try again in a moment."


@dataclass(frozen=True)
class ImageDownload:
    """A file that is on its way."""

    name: str
    size_bytes: int
    pieces: AsyncIterator[bytes]


async def export_sandbox(
    sandbox: Sandbox,
    *,
    by: Doer,
    generation: int | None = None,
    consistency: Cut.Consistency = Cut.Consistency.FILESYSTEM,
) -> ImageDownload:
    """Open the disk of a sandbox as it is now, or was at a moment of its history.

    Raises:
        WrongState, CutFailed, MomentNotFound: of the sandbox.
        NoCapacity, ImageUnavailable: of the hosts.
    """
    if generation is None:
        cut = await snapshots.cut_of(sandbox, consistency)
    else:
        cut = await run_db(_cut_at, sandbox, generation)
    await run_db(_record, sandbox, by, "sandbox", sandbox.id)
    return await _open(cut, f"{sandbox.id}.qcow2")


async def export_snapshot(snapshot: Snapshot, *, by: Doer) -> ImageDownload:
    """Open the disk that a snapshot keeps.

    Raises:
        SnapshotNotFound: it was deleted a moment ago.
        NoCapacity, ImageUnavailable: of the hosts.
    """
    cut = await run_db(_cut_for, snapshot)
    await run_db(_record, snapshot.sandbox, by, "snapshot", snapshot.id)
    return await _open(cut, f"{snapshot.id}.qcow2")


def _cut_at(sandbox: Sandbox, number: int) -> Cut:
    with transaction.atomic():
        sandbox = locked(sandbox)
        return _kept(sandbox, snapshots.held_moment(sandbox, number))


def _cut_for(snapshot: Snapshot) -> Cut:
    with transaction.atomic():
        snapshot = held_snapshot(snapshot.team, snapshot.id)
        assert snapshot.generation is not None
        keep_generation(snapshot.generation)
        return _kept(snapshot.sandbox, snapshot.generation)


def _kept(sandbox: Sandbox, generation: Generation) -> Cut:
    now = timezone.now()
    return Cut.objects.create(
        sandbox=sandbox,
        state=Cut.State.DONE,
        generation=generation,
        ended_at=now,
        keep_until=now + cuts.KEPT,
    )


def _record(sandbox: Sandbox, by: Doer, kind: str, identity: str) -> None:
    record_event(
        team=sandbox.team,
        action=f"{kind}.export",
        resource_type=kind,
        resource_id=identity,
        user=by.user,
        api_key=by.api_key,
        source_ip=by.source_ip,
    )


async def _open(cut: Cut, name: str) -> ImageDownload:
    host = await run_db(_ask_a_host, cut)
    reader, writer = await connected(host, cut.pk)
    try:
        async with asyncio.timeout(COUNT_TIMEOUT_S):
            line = await reader.readline()
        size_bytes = int(line)
    except (TimeoutError, ValueError, asyncssh.Error, OSError) as error:
        writer.close()
        raise ImageUnavailable from error
    return ImageDownload(name, size_bytes, _pieces(reader, writer, cut, size_bytes))


def _ask_a_host(cut: Cut) -> Host:
    with transaction.atomic():
        host = host_for_files()
        transaction.on_commit(partial(actors.send, actors.serve_image, host.queue, str(cut.pk)))
    return host


async def connected(
    host: Host, image_id: UUID
) -> tuple[asyncssh.SSHReader[bytes], asyncssh.SSHWriter[bytes]]:
    """Open the stream of an export or an intake as soon as the host has started it.

    Raises:
        ImageUnavailable: it did not in time.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + START_TIMEOUT_S
    while True:
        try:
            return await access.links().image(access.gate_endpoint(host), image_id)
        except LinkDown as error:
            if loop.time() >= until:
                raise ImageUnavailable from error
        await asyncio.sleep(RETRY_S)


async def _pieces(
    reader: asyncssh.SSHReader[bytes],
    writer: asyncssh.SSHWriter[bytes],
    cut: Cut,
    size_bytes: int,
) -> AsyncIterator[bytes]:
    """Pass the file on. Whoever takes it sees by its length when it was cut short."""
    loop = asyncio.get_running_loop()
    left_bytes, keep_at = size_bytes, loop.time() + KEEP_EVERY_S
    try:
        while left_bytes > 0:
            piece = await reader.read(min(PIECE_BYTES, left_bytes))
            if not piece:
                raise ConnectionError(f"an image ended {left_bytes} bytes before its end")
            left_bytes -= len(piece)
            yield piece
            if loop.time() > keep_at:
                keep_at = loop.time() + KEEP_EVERY_S
                await run_db(_keep_on, cut)
    finally:
        writer.close()


def _keep_on(cut: Cut) -> None:
    Cut.objects.filter(pk=cut.pk).update(keep_until=timezone.now() + timedelta(hours=1))


def sent(download: ImageDownload) -> HttpResponseBase:
    """Return the answer that carries an image; its length tells when it was cut short."""
    response = StreamingHttpResponse(download.pieces, content_type="application/octet-stream")
    response["Content-Length"] = str(download.size_bytes)
    response["Content-Disposition"] = f'attachment; filename="{download.name}"'
    response["Cache-Control"] = "private, no-store"
    return response
