"""Templates of uploaded images: the web's side, which passes the file on to a host."""

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import asyncssh
from django.db import transaction
from django.utils import timezone

from accounts.models import Team
from accounts.services import Doer
from common.api.database import run_db
from common.errors import Refused
from common.units import MiB
from hosts.models import Host
from sandboxes import actors, images
from sandboxes.importing import image_id
from sandboxes.models import DEFAULT_MEMORY_BYTES, Template
from sandboxes.services import host_for_files
from sandboxes.snapshots import insert_template, record_template

log = logging.getLogger(__name__)

# The host unpacks the image and answers; a large one takes a while.
CHECK_TIMEOUT_S = 600.0
SEND_TIMEOUT_S = 300.0


class ImageRefused(Refused):
    """The image is none that can be taken; the reason is the host's."""

    code = "bad_request"
    status = 400

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


async def import_template(
    *,
    team: Team,
    by: Doer,
    template_id: str,
    spec: dict[str, Any],
    body: AsyncIterator[bytes],
    size_bytes: int,
) -> Template:
    """Pass an image on to a host, which checks it; the template is ready when it is stored.

    Raises:
        TemplateExists, ImageRefused: nothing is left.
        NoCapacity, ImageUnavailable: of the hosts; nothing is left.
    """
    template = await run_db(_record, team, by, template_id, spec)
    try:
        host = await run_db(_ask_a_host, template)
        await _send(host, template, body, size_bytes)
    except BaseException:
        await asyncio.shield(run_db(_forget, template))
        raise
    return await run_db(_go_on, template, host)


def _record(team: Team, by: Doer, template_id: str, spec: dict[str, Any]) -> Template:
    with transaction.atomic():
        template = Template(
            team=team,
            template_id=template_id,
            spec={
                "displayName": template_id,
                "description": "Imported from an image.",
                "tags": [],
                "mainContainer": {
                    "image": f"sandkeep/{template_id}",
                    "resources": {"memory": f"{DEFAULT_MEMORY_BYTES // MiB}Mi"},
                },
            }
            | spec,
            creation=Template.Creation.CREATING,
        )
        insert_template(template)
        record_template(template, "import", by)
    return template


def _ask_a_host(template: Template) -> Host:
    with transaction.atomic():
        host = host_for_files()
        transaction.on_commit(
            partial(actors.send, actors.take_image, host.queue, str(template.pk))
        )
    return host


async def _send(
    host: Host, template: Template, body: AsyncIterator[bytes], size_bytes: int
) -> None:
    reader, writer = await images.connected(host, image_id(template.pk))
    try:
        writer.write(b"%d\n" % size_bytes)
        async for piece in body:
            writer.write(piece)
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await writer.drain()
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            answer = (await reader.readline()).decode(errors="replace").strip()
    except (TimeoutError, asyncssh.Error, OSError) as error:
        raise images.ImageUnavailable from error
    finally:
        writer.close()
    verdict, _, rest = answer.partition(" ")
    if verdict == "error":
        raise ImageRefused(rest)
    if verdict != "ok":
        raise images.ImageUnavailable


def _forget(template: Template) -> None:
    Template.objects.filter(pk=template.pk).delete()


def _go_on(template: Template, host: Host) -> Template:
    with transaction.atomic():
        template.captured_at = timezone.now()
        template.save(update_fields=["captured_at"])
        transaction.on_commit(
            partial(actors.send, actors.import_template, host.queue, str(template.pk))
        )
    return template
