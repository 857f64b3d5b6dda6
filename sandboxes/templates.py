"""Making templates out of disk images."""

import hashlib
import re
from collections.abc import Collection
from datetime import datetime, timedelta
from pathlib import Path
from uuid import UUID

from django.db import transaction
from django.utils import timezone

from common.units import MiB
from hosts import local
from hosts.models import Generation
from hosts.services import new_volume, publish_commit
from hosts.volumes.commit import import_image
from sandboxes.models import Template

TEMPLATE_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,254}")
# An upload, its check and its storing, at their slowest.
IMPORT_GIVE_UP = timedelta(hours=6)
RESERVED_IDS = frozenset({"from-sandbox", "import"})


def is_template_id(text: str) -> bool:
    """Say whether a team may call a template this; it becomes part of paths."""
    return TEMPLATE_ID.fullmatch(text) is not None and text not in RESERVED_IDS


def import_public_template(
    *,
    template_id: str,
    image: Path,
    display_name: str,
    description: str,
    memory_bytes: int,
    size_bytes: int,
) -> tuple[Template, bool]:
    """Store an image as generation 0 of a new volume, and have a public template name it.

    Sandboxes that were made from an earlier image keep it. An import that was cut off
    leaves objects that nothing names, and is done again.

    Args:
        size_bytes: the ceiling that its sandboxes' disks may grow to.

    Returns:
        The template, and whether anything was imported: not where its image is this very
        file already.
    """
    facts = image.stat()
    source = f"{image.name}:{facts.st_size}:{facts.st_mtime_ns}"
    current = Template.objects.filter(team=None, template_id=template_id).first()
    if current is not None and current.source == source and current.is_ready:
        return current, False

    # The platform's own: its key is shared by all who start from it.
    volume = new_volume(owner="")
    commit = import_image(
        image,
        volume_id=volume.pk,
        store=local.object_store(),
        size_bytes=size_bytes,
        keyring=local.keyring(),
    )
    with transaction.atomic():
        generation = publish_commit(
            volume.pk, epoch=volume.epoch, kind=Generation.Kind.BASE, commit=commit
        )
        template, _ = Template.objects.update_or_create(
            team=None,
            template_id=template_id,
            defaults={
                "spec": _spec(
                    template_id, commit.root_key, display_name, description, memory_bytes
                ),
                "memory_bytes": memory_bytes,
                "generation": generation,
                "source": source,
            },
        )
    return template, True


def finish_captured(cut_ids: Collection[UUID], generation: Generation, *, at: datetime) -> None:
    """Make the templates ready that waited for these cuts."""
    waiting = Template.objects.filter(
        cut__in=cut_ids, creation=Template.Creation.CREATING
    ).select_for_update()
    for template in waiting:
        make_ready(template, generation, at=at)


def make_ready(template: Template, generation: Generation, *, at: datetime) -> None:
    """Give a template that is being made its disk."""
    template.generation = generation
    template.creation = Template.Creation.READY
    template.captured_at = template.captured_at or at
    template.completed_at = at
    template.spec["mainContainer"]["image"] = image_name(
        template.template_id, generation.root_key
    )
    template.save()


def fail_captured(cut_ids: Collection[UUID], reason: str, *, at: datetime) -> None:
    """Note that the templates which waited for these cuts will never be ready."""
    waiting = Template.objects.filter(cut__in=cut_ids, creation=Template.Creation.CREATING)
    waiting.update(
        creation=Template.Creation.FAILED, creation_error=reason[:300], completed_at=at
    )


def fail_stuck_imports() -> None:
    """Give up on templates whose image never came, or was never stored."""
    now = timezone.now()
    stuck = Template.objects.filter(
        creation=Template.Creation.CREATING, cut=None, created_at__lt=now - IMPORT_GIVE_UP
    )
    stuck.update(
        creation=Template.Creation.FAILED,
        creation_error="The image was not stored in time.",
        completed_at=now,
    )


def image_name(template_id: str, root_key: str) -> str:
    """Return what stands for a template's image on the wire, pinned by a digest.

    Ours is the digest of the root, which names each block.
    """
    digest = hashlib.sha256(root_key.encode()).hexdigest()
    return f"sandkeep/{template_id}@sha256:{digest}"


def _spec(
    template_id: str, root_key: str, display_name: str, description: str, memory_bytes: int
) -> dict[str, object]:
    return {
        "displayName": display_name,
        "description": description,
        "tags": [],
        "mainContainer": {
            "image": image_name(template_id, root_key),
            "resources": {"memory": f"{memory_bytes // MiB}Mi"},
        },
    }
