"""Placing guests on the fleet, and who may write to a volume."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import IPv4Address, IPv4Network
from uuid import UUID

from django.db import connection, transaction
from django.db.models import F
from django.utils import timezone

from hosts.errors import (
    GenerationGone,
    NoCapacity,
    ObjectsCollected,
    StaleEpoch,
    VolumeBusy,
)
from hosts.keys import data_key_of
from hosts.models import Generation, Host, Placement, Reading, StoredObject, Volume
from hosts.network import addresses
from hosts.volumes.commit import Commit, Rewrite
from hosts.volumes.errors import HeadMoved
from hosts.volumes.naming import parse_key

OBJECTS_BATCH = 1000
"""Rows that one statement writes: a large import has tens of thousands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReport:
    """What a host's worker tells of its machine at each heartbeat."""

    used_bytes: int
    cpu_count: int
    versions: dict[str, str]


def place(*, guest_uuid: UUID, memory_bytes: int, prefer: Host | None = None) -> Placement:
    """Promise a guest memory and an address on a host; the same guest keeps its place.

    The preferred host comes first (it still holds the guest's disk), then the fullest with
    room: filling the fullest keeps empty hosts empty, so that they can be taken away.

    Raises:
        NoCapacity: no open, living host has the room or an address.
    """
    with transaction.atomic():
        placement = Placement.objects.select_for_update().filter(pk=guest_uuid).first()
        if placement is not None:
            return placement
        # Locked in one order by all, so that two that place cannot wait for each other.
        candidates = Host.objects.with_room_for(memory_bytes).order_by("pk").select_for_update()
        hosts = sorted(
            candidates,
            key=lambda host: (host != prefer, -host.promised_bytes, host.pk),
        )
        for host in hosts:
            address = _free_address(host)
            if address is None:
                continue
            host.promised_bytes += memory_bytes
            host.save(update_fields=["promised_bytes"])
            return Placement.objects.create(
                guest_uuid=guest_uuid, host=host, memory_bytes=memory_bytes, address=address
            )
    raise NoCapacity(memory_bytes)


def _free_address(host: Host) -> str | None:
    """Return a free address after the one given last, so that one just given back rests.

    Neighbours and connection tables remember it for a while.
    """
    guests = addresses(IPv4Network(host.subnet))
    placements = host.placements.order_by("-created_at").values_list("address", flat=True)
    taken = set(placements)
    start = guests.index(IPv4Address(placements[0])) + 1 if taken else 0
    for step in range(guests.capacity):
        address = str(guests.address((start + step) % guests.capacity))
        if address not in taken:
            return address
    return None


def release_place(guest_uuid: UUID) -> None:
    """Take a guest's promise and address back. Does nothing if it has none."""
    with transaction.atomic():
        placement = Placement.objects.filter(pk=guest_uuid).first()
        if placement is None:
            return
        # The host before the placement, as `place` takes them: the other order can deadlock.
        Host.objects.select_for_update().get(pk=placement.host_id)
        deleted, _ = Placement.objects.filter(pk=guest_uuid).delete()
        if deleted:
            Host.objects.filter(pk=placement.host_id).update(
                promised_bytes=F("promised_bytes") - placement.memory_bytes
            )


def new_volume(*, owner: str, head: Generation | None = None) -> Volume:
    """Make a volume, empty or with the content of a generation, which is not copied.

    Its objects are encrypted with its owner's key. To be called in the transaction that
    found the generation: it stays from here on.

    Args:
        owner: who is billed for what it stores; empty is the platform.

    Raises:
        GenerationGone: the generation was given up a moment ago.
        KeyDestroyed: the owner's key was destroyed with the owner.
    """
    with transaction.atomic():
        if head is not None:
            keep_generation(head)
        return Volume.objects.create(owner=owner, key=data_key_of(owner), head=head)


def keep_generation(generation: Generation) -> None:
    """Keep a generation from being given up or moved until the transaction ends.

    Others may keep it, too. Whoever makes anything of a generation calls this before it
    copies its root key, which is read anew.

    Raises:
        GenerationGone: it was given up a moment ago.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT root_key FROM hosts_generation WHERE id = %s FOR SHARE",
            [generation.pk],
        )
        row = cursor.fetchone()
    if row is None:
        raise GenerationGone
    generation.root_key = row[0]


def begin_reading(generation: Generation, *, span: timedelta) -> str:
    """Keep all that a generation needs for a while, whatever becomes of it; give its root.

    Raises:
        GenerationGone: it was given up a moment ago.
    """
    with transaction.atomic():
        keep_generation(generation)
        Reading.objects.filter(until__lt=timezone.now()).delete()
        Reading.objects.create(root_key=generation.root_key, until=timezone.now() + span)
    return generation.root_key


def attach_volume(volume_id: UUID, *, host: Host, purpose: Volume.Purpose) -> Volume:
    """Give a host the right to write to a volume, under a new epoch.

    A host that has it for this purpose already keeps its epoch, so that a retry finds the
    disk which an earlier try attached.

    Raises:
        VolumeBusy: another host, or this one for another purpose, has it.
    """
    with transaction.atomic():
        volume = _locked(volume_id)
        if volume.attached_host_id is not None:
            if volume.attached_host_id != host.pk or volume.attached_for != purpose:
                raise VolumeBusy(volume.pk, volume.attached_host_id)
            return volume
        if volume.head is not None:
            # Waits for a repacking that moves its root, and keeps the next one away.
            keep_generation(volume.head)
        volume.epoch += 1
        volume.attached_host = host
        volume.attached_for = purpose
        volume.files_ready_at = None
        volume.attachment_gets = 0
        volume.save(
            update_fields=[
                "epoch",
                "attached_host",
                "attached_for",
                "files_ready_at",
                "attachment_gets",
            ]
        )
        return volume


def _locked(volume_id: UUID) -> Volume:
    """Lock a volume's row.

    Its head is read by a statement of its own: one that waits for the lock sees the row as it
    is then, and what it joins as that was before. A head that moved meanwhile would be missing.
    """
    return Volume.objects.select_for_update().get(pk=volume_id)


def seize_volume(volume_id: UUID, *, host: Host) -> Volume:
    """Take a volume from a host that is lost, and the right to publish with it.

    The epoch goes up at once, and not only when the next host attaches it: from here on
    nothing that the old one still stores can become the head.
    """
    with transaction.atomic():
        volume = Volume.objects.select_for_update().get(pk=volume_id)
        if volume.attached_host_id == host.pk:
            volume.epoch += 1
            volume.attached_host = None
            volume.attached_for = Volume.Purpose.NONE
            volume.files_ready_at = None
            volume.save(
                update_fields=["epoch", "attached_host", "attached_for", "files_ready_at"]
            )
        return volume


def detach_volume(volume_id: UUID, *, epoch: int) -> None:
    """Take the right back that was given with this epoch. Does nothing if it is gone."""
    Volume.objects.filter(pk=volume_id, epoch=epoch).update(
        attached_host=None, attached_for=Volume.Purpose.NONE, files_ready_at=None
    )


def mark_files_ready(volume_id: UUID, *, epoch: int, at: datetime | None) -> None:
    """Say that a paused volume's files are (`at`) or are no longer (None) served."""
    Volume.objects.filter(pk=volume_id, epoch=epoch, attached_for=Volume.Purpose.FILES).update(
        files_ready_at=at
    )


def publish_commit(
    volume_id: UUID,
    *,
    epoch: int,
    kind: Generation.Kind,
    commit: Commit,
    start_blocks: bytes | None = None,
) -> Generation:
    """Move a volume's head to what a commit has stored; the same commit changes nothing.

    Raises:
        StaleEpoch: the volume was given to someone else since.
        HeadMoved: the commit was not made from its head.
        ObjectsCollected: the collector has given up an object that the commit put.
    """
    try:
        with transaction.atomic():
            return _publish_commit(volume_id, epoch, kind, commit, start_blocks)
    except ObjectsCollected:
        # The next try adopts nothing, so it is another commit.
        Volume.objects.filter(pk=volume_id).update(packs_to_rewrite=[])
        raise


def _publish_commit(
    volume_id: UUID,
    epoch: int,
    kind: Generation.Kind,
    commit: Commit,
    start_blocks: bytes | None,
) -> Generation:
    volume = _publishable(volume_id, epoch)
    head = volume.head
    if head is not None and head.root_key == commit.root_key:
        return head
    root_key = None if head is None else head.root_key
    if root_key != commit.base_root_key:
        raise HeadMoved(volume_id, root_key)
    _record_objects(volume, commit)
    return publish_generation(
        volume_id,
        epoch=epoch,
        kind=kind,
        root_key=commit.root_key,
        size_bytes=commit.size_bytes,
        blocks_changed=commit.blocks_changed,
        uploaded_bytes=commit.uploaded_bytes,
        index_bytes=commit.index_bytes,
        stored_bytes=commit.stored_bytes,
        start_blocks=start_blocks,
    )


def _publishable(volume_id: UUID, epoch: int) -> Volume:
    volume = _locked(volume_id)
    if volume.epoch != epoch or volume.deleted_at is not None:
        raise StaleEpoch(volume_id, epoch)
    return volume


def _record_objects(volume: Volume, commit: Commit) -> None:
    """Say what the volume stores from now on, and count the requests that put it there."""
    objects = commit.objects
    for at in range(0, len(objects), OBJECTS_BATCH):
        batch = objects[at : at + OBJECTS_BATCH]
        # An earlier try may have left a row, dead or not: a row says that there is an object.
        StoredObject.objects.bulk_create(
            [StoredObject(volume=volume, key=key, size_bytes=size) for key, size in batch],
            update_conflicts=True,
            unique_fields=["key"],
            update_fields=["dead_at"],
        )
    adopted = StoredObject.objects.filter(key__in=commit.adopted)
    if adopted.update(dead_at=None) != len(commit.adopted):
        raise ObjectsCollected(volume.pk)
    Volume.objects.filter(pk=volume.pk).update(
        store_puts=F("store_puts") + len(objects), packs_to_rewrite=[]
    )


def publish_generation(
    volume_id: UUID,
    *,
    epoch: int,
    kind: Generation.Kind,
    root_key: str,
    size_bytes: int,
    blocks_changed: int = 0,
    uploaded_bytes: int = 0,
    index_bytes: int = 0,
    stored_bytes: int = 0,
    start_blocks: bytes | None = None,
) -> Generation:
    """Move a volume's head to a new generation; the same root again changes nothing.

    For a root that another generation, kept by `keep_generation`, has already; a commit is
    published by `publish_commit`.

    Raises:
        StaleEpoch: the volume was given to someone else since.
    """
    with transaction.atomic():
        volume = _publishable(volume_id, epoch)
        if volume.head is not None and volume.head.root_key == root_key:
            return volume.head
        generation = Generation.objects.create(
            volume=volume,
            number=volume.head.number + 1 if volume.head else 0,
            epoch=epoch,
            kind=kind,
            root_key=root_key,
            size_bytes=size_bytes,
            blocks_changed=blocks_changed,
            uploaded_bytes=uploaded_bytes,
            index_bytes=index_bytes,
            stored_bytes=stored_bytes,
            start_blocks=start_blocks,
        )
        volume.head = generation
        volume.save(update_fields=["head"])
        return generation


def packs_to_rewrite(volume_id: UUID) -> Rewrite:
    """Return the packs that the collector would like the volume's next commit to empty."""
    keys = Volume.objects.values_list("packs_to_rewrite", flat=True).get(pk=volume_id)
    packs = [parse_key(key)[1] for key in keys if key.startswith("packs/")]
    donors = [key for key in keys if key.startswith("roots/")]
    return Rewrite.of(packs, donors[0] if donors else None)


def count_gets(volume_id: UUID, *, epoch: int, requests: int) -> None:
    """Note how often an attached volume has asked the object store since it was attached.

    Args:
        requests: all of this attachment; those that were told before count once.
    """
    Volume.objects.filter(pk=volume_id, epoch=epoch, attachment_gets__lt=requests).update(
        store_gets=F("store_gets") + requests - F("attachment_gets"), attachment_gets=requests
    )


def record_heartbeat(host: Host, report: HostReport) -> None:
    """Note that the host's worker lives, and what it says of its machine."""
    Host.objects.filter(pk=host.pk).update(
        seen_at=timezone.now(),
        used_bytes=report.used_bytes,
        cpu_count=report.cpu_count,
        versions=report.versions,
    )
