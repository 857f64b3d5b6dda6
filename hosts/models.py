"""The fleet: its machines, what each has promised, and the volumes that they attach."""

import uuid
from datetime import timedelta
from typing import Self

from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import F, Value
from django.utils import timezone

# Three missed heartbeats of two seconds, and some slack for a busy machine.
SILENT_AFTER = timedelta(seconds=15)


class HostQuerySet(models.QuerySet["Host"]):
    def alive(self) -> Self:
        return self.filter(seen_at__gt=timezone.now() - SILENT_AFTER)

    def with_room_for(self, memory_bytes: int) -> Self:
        """Return the open, living hosts that can still promise this much memory."""
        return self.alive().filter(
            is_open=True, memory_bytes__gte=F("promised_bytes") + memory_bytes
        )


class Host(models.Model):
    """A machine that runs sandboxes.

    `promised_bytes` counts memory from the moment a guest is placed, before it boots, so
    that two guests placed at once never share the same room. It is the sum of the host's
    placements, kept by `hosts.services` under the row's lock.
    """

    name = models.SlugField(max_length=40, unique=True)
    gate_host = models.CharField(max_length=200)
    gate_port = models.PositiveIntegerField()
    gate_public_key = models.TextField(help_text="Pinned: the gate must show this key.")
    subnet = models.CharField(max_length=43, help_text="Where its guests have addresses.")
    memory_bytes = models.PositiveBigIntegerField(help_text="What it may promise to guests.")
    promised_bytes = models.PositiveBigIntegerField(default=0, editable=False)
    used_bytes = models.PositiveBigIntegerField(default=0, editable=False)
    cpu_count = models.PositiveIntegerField(default=1, validators=[MinValueValidator(1)])
    accelerator = models.CharField(max_length=8, default="tcg")
    versions = models.JSONField(default=dict, blank=True)
    is_open = models.BooleanField(default=True, help_text="Takes new guests.")
    seen_at = models.DateTimeField(null=True, editable=False)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    objects = HostQuerySet.as_manager()

    class Meta:
        constraints = (
            models.CheckConstraint(
                name="host_promises_at_most_its_memory",
                condition=models.Q(promised_bytes__lte=F("memory_bytes")),
            ),
        )

    def __str__(self) -> str:
        return self.name

    @property
    def queue(self) -> str:
        """Name of the queue that only this host's worker reads."""
        return f"host.{self.name}"

    @property
    def is_alive(self) -> bool:
        return self.seen_at is not None and self.seen_at > timezone.now() - SILENT_AFTER


class Placement(models.Model):
    """A guest's place on a host: its memory and its address."""

    guest_uuid = models.UUIDField(primary_key=True, editable=False)
    host = models.ForeignKey(Host, models.PROTECT, related_name="placements")
    memory_bytes = models.PositiveBigIntegerField()
    address = models.GenericIPAddressField(protocol="IPv4")
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = (
            models.UniqueConstraint(
                fields=["host", "address"], name="address_belongs_to_one_guest_of_a_host"
            ),
        )

    def __str__(self) -> str:
        return f"{self.guest_uuid} on {self.host_id}"


class DataKey(models.Model):
    """What one owner's objects are encrypted with, itself encrypted by the master key.

    `wrapped` is empty until the first host needs the key, and again once it is destroyed,
    and with it all that it encrypted.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    owner = models.CharField(max_length=64, unique=True, editable=False)
    wrapped = models.BinaryField(null=True, editable=False)
    master_key_id = models.CharField(max_length=64, editable=False)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    destroyed_at = models.DateTimeField(null=True, editable=False)

    def __str__(self) -> str:
        return str(self.id)


class Volume(models.Model):
    """A disk. Its content is `head`; at most one host writes to it at a time.

    `epoch` goes up at each attachment. A host may publish only under the epoch that it was
    given, so one that was thought dead can never move the head again.
    """

    class Purpose(models.TextChoices):
        NONE = ""
        RUN = "run"
        FILES = "files"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    head = models.ForeignKey(
        "Generation", models.PROTECT, null=True, related_name="heads", editable=False
    )
    epoch = models.PositiveIntegerField(default=0, editable=False)
    attached_host = models.ForeignKey(
        Host, models.PROTECT, null=True, related_name="volumes", editable=False
    )
    attached_for = models.CharField(
        max_length=5, choices=Purpose, default=Purpose.NONE, blank=True, editable=False
    )
    files_ready_at = models.DateTimeField(null=True, editable=False)
    owner = models.CharField(
        max_length=64,
        default="",
        db_default="",
        db_index=True,
        editable=False,
        help_text="Who is billed for what it stores; empty is the platform.",
    )
    key = models.ForeignKey(
        DataKey,
        models.PROTECT,
        null=True,
        related_name="volumes",
        editable=False,
        help_text="None: its objects were written before there was encryption.",
    )
    store_gets = models.PositiveBigIntegerField(default=0, db_default=0, editable=False)
    store_puts = models.PositiveBigIntegerField(default=0, db_default=0, editable=False)
    attachment_gets = models.PositiveBigIntegerField(
        default=0,
        db_default=0,
        editable=False,
        help_text="Of this attachment, and in store_gets already.",
    )
    packs_to_rewrite = models.JSONField(
        default=list,
        db_default=Value([], models.JSONField()),
        blank=True,
        editable=False,
        help_text="Keys of packs with little left alive, which the next commit empties, and of "
        "the root of a generation that has their blocks elsewhere.",
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    deleted_at = models.DateTimeField(null=True, editable=False)

    class Meta:
        constraints = (
            models.CheckConstraint(
                name="volume_is_attached_to_a_host_for_a_purpose",
                condition=models.Q(attached_host=None, attached_for="")
                | (models.Q(attached_host__isnull=False) & ~models.Q(attached_for="")),
            ),
        )

    def __str__(self) -> str:
        return str(self.id)


class Generation(models.Model):
    """A committed state of a volume: immutable, numbered, the root of an index."""

    class Kind(models.TextChoices):
        BASE = "base", "base image"
        PAUSE = "pause", "pause"
        CHECKPOINT = "checkpoint", "checkpoint"
        BACKGROUND = "background", "in the background"
        RESTORE = "restore", "restored"
        FILES = "files", "files edited while paused"

    volume = models.ForeignKey(Volume, models.PROTECT, related_name="generations")
    number = models.PositiveIntegerField()
    epoch = models.PositiveIntegerField()
    kind = models.CharField(max_length=10, choices=Kind)
    root_key = models.CharField(max_length=200)
    size_bytes = models.PositiveBigIntegerField()
    blocks_changed = models.PositiveBigIntegerField(default=0)
    uploaded_bytes = models.PositiveBigIntegerField(default=0)
    index_bytes = models.PositiveBigIntegerField(default=0)
    stored_bytes = models.PositiveBigIntegerField(
        default=0, help_text="Kept for this volume alone: its base is not counted."
    )
    start_blocks = models.BinaryField(
        null=True, help_text="Learned: what is read in the first seconds of a start."
    )
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ("number",)
        constraints = (
            models.UniqueConstraint(
                fields=["volume", "number"], name="generation_number_is_unique_in_a_volume"
            ),
        )

    def __str__(self) -> str:
        return f"{self.volume_id}@{self.number}"


class StoredObject(models.Model):
    """An object that a commit of a volume put into the store, until it is deleted there.

    `dead_at` is when the collector first found that no live root names it; it is not billed
    from then on.
    """

    volume = models.ForeignKey(Volume, models.PROTECT, related_name="objects_stored")
    key = models.CharField(max_length=120, unique=True)
    size_bytes = models.PositiveBigIntegerField()
    created_at = models.DateTimeField(default=timezone.now)
    dead_at = models.DateTimeField(null=True)

    class Meta:
        indexes = (
            models.Index(
                fields=["volume"],
                include=["size_bytes"],
                name="stored_pack_live",
                condition=models.Q(dead_at=None, key__startswith="packs/"),
            ),
            models.Index(
                fields=["dead_at"],
                name="stored_object_dead",
                condition=models.Q(dead_at__isnull=False),
            ),
        )

    def __str__(self) -> str:
        return self.key


class Reading(models.Model):
    """Somebody reads a generation without attaching it: what its root names stays until then.

    The generation itself may be given up, or moved to another root, meanwhile.
    """

    root_key = models.CharField(max_length=200)
    until = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.root_key} until {self.until}"
