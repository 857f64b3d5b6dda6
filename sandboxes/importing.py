"""What a host's worker does to make a template of an uploaded image. Safe to repeat."""

import logging
from contextlib import suppress
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from common.units import GiB, TiB
from hosts import local
from hosts.errors import GuestBusy
from hosts.models import Generation
from hosts.services import new_volume, publish_commit
from hosts.volumes.commit import import_image
from hosts.volumes.image_intake import IntakeConfig
from sandboxes.models import Template
from sandboxes.templates import make_ready

log = logging.getLogger(__name__)

# What an imported disk may grow to, as the platform's own templates.
CEILING_BYTES = TiB


def image_id(template_pk: int) -> UUID:
    """Return what names a template's upload on its host."""
    return UUID(int=template_pk)


def limits() -> IntakeConfig:
    """Return how large an image may be."""
    return IntakeConfig(
        file_bytes=settings.IMPORT_MAX_BYTES,
        device_bytes=CEILING_BYTES,
        data_bytes=max(settings.IMPORT_MAX_BYTES, 64 * GiB),
    )


def take_image(template_pk: str) -> None:
    """Wait for a template's image to be sent through the gate.

    Raises:
        Unavailable: not now; the message comes again.
    """
    drop_left_over_images()
    if _wanted(template_pk) is not None:
        local.image_exports().take_in(image_id(int(template_pk)), limits())


def import_template(template_pk: str) -> None:
    """Store an image that was taken in, and make its template ready.

    Raises:
        Unavailable: it is not all stored yet; the message comes again.
    """
    path = local.image_exports().taken(image_id(int(template_pk)))
    with local.guest_lock(image_id(int(template_pk))):
        template = _wanted(template_pk)
        if template is not None and path.exists():
            _store(template)
    path.unlink(missing_ok=True)


def drop_left_over_images() -> None:
    """Remove what images left behind whose intake died, or whose import nobody asks for."""
    for identity, path in local.image_exports().left_over():
        with suppress(GuestBusy), local.guest_lock(identity):
            if path.suffix != ".raw" or not _is_awaited(identity.int):
                path.unlink(missing_ok=True)
                log.info("what was left of an intake is removed: %s", path.name)


def _is_awaited(template_pk: int) -> bool:
    """Tell whether an image that was taken in is to be stored, or stored again."""
    creating = Template.objects.filter(creation=Template.Creation.CREATING)
    return creating.filter(pk=template_pk, captured_at__isnull=False).exists()


def _wanted(template_pk: str) -> Template | None:
    creating = Template.objects.filter(creation=Template.Creation.CREATING)
    return creating.filter(pk=template_pk).first()


def _store(template: Template) -> None:
    path = local.image_exports().taken(image_id(template.pk))
    volume = new_volume(owner=str(template.team_id))
    commit = import_image(
        path,
        volume_id=volume.pk,
        store=local.object_store(),
        size_bytes=max(CEILING_BYTES, path.stat().st_size),
        keyring=local.keyring(),
    )
    with transaction.atomic():
        generation = publish_commit(
            volume.pk, epoch=volume.epoch, kind=Generation.Kind.BASE, commit=commit
        )
        found = Template.objects.select_for_update().filter(pk=template.pk).first()
        if found is None:
            # Deleted while it was stored: nothing names the disk any more.
            type(volume).objects.filter(pk=volume.pk).update(deleted_at=timezone.now())
            return
        make_ready(found, generation, at=timezone.now())
    log.info("template %s is imported", template.template_id)
