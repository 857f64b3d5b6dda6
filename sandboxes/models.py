"""Templates, sandboxes and their states."""

import re
import secrets
import uuid
from typing import ClassVar, Self

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils import timezone

from accounts.models import ApiKey, Team
from common.units import MiB
from hosts.models import Generation, Host, Volume
from sandboxes.errors import WrongState

DEFAULT_MEMORY_BYTES = 512 * MiB
ID_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
SNAPSHOT_ID = re.compile(r"rootfs-snapshot-[a-z0-9]{20}")


class Cut(models.Model):
    """A committed state of a sandbox's disk that somebody waits for.

    Wanted by a request; the generation is found or made by the sandbox's host. The row keeps
    its generation from being thinned out until `keep_until`.
    """

    class State(models.TextChoices):
        WANTED = "wanted"
        DONE = "done"
        FAILED = "failed"

    class Consistency(models.TextChoices):
        FILESYSTEM = "filesystem", "the file system was synced and frozen"
        CRASH = "crash", "as after a power failure"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    sandbox = models.ForeignKey("Sandbox", models.CASCADE, related_name="cuts")
    consistency = models.CharField(
        max_length=10, choices=Consistency, default=Consistency.FILESYSTEM
    )
    state = models.CharField(max_length=6, choices=State, default=State.WANTED)
    generation = models.ForeignKey(
        Generation, models.PROTECT, null=True, related_name="cuts", editable=False
    )
    error = models.CharField(max_length=300, blank=True)
    requested_at = models.DateTimeField(default=timezone.now)
    ended_at = models.DateTimeField(null=True)
    keep_until = models.DateTimeField(null=True)

    class Meta:
        constraints = (
            models.CheckConstraint(
                name="cut_that_is_done_has_a_generation",
                condition=~Q(state="done") | Q(generation__isnull=False),
            ),
        )
        indexes = (
            models.Index(
                fields=["sandbox", "requested_at"],
                name="cut_wanted",
                condition=Q(state="wanted"),
            ),
        )

    def __str__(self) -> str:
        return f"{self.sandbox_id} {self.state}"


class TemplateQuerySet(models.QuerySet["Template"]):
    def visible_to(self, team: Team) -> Self:
        """Return the public templates and the team's own."""
        return self.filter(Q(team=None) | Q(team=team))


class Template(models.Model):
    """What a sandbox starts from: a generation of a disk, and defaults.

    `spec` is the wire's SandboxTemplateSpec, kept as it is answered. One that is made from a
    sandbox or an upload has a `creation`; others are ready from the start.
    """

    class Creation(models.TextChoices):
        NONE = ""
        CREATING = "creating"
        READY = "ready"
        FAILED = "failed"

    team = models.ForeignKey(Team, models.CASCADE, null=True, related_name="templates")
    template_id = models.CharField(max_length=255)
    spec = models.JSONField()
    memory_bytes = models.PositiveBigIntegerField(default=DEFAULT_MEMORY_BYTES)
    generation = models.ForeignKey(
        Generation, models.PROTECT, null=True, related_name="templates"
    )
    # Says which image file it was imported from, so that the same one is not imported twice.
    source = models.CharField(max_length=200, blank=True, editable=False)
    creation = models.CharField(
        max_length=8, choices=Creation, default="", db_default="", blank=True, editable=False
    )
    creation_error = models.CharField(
        max_length=300, default="", db_default="", blank=True, editable=False
    )
    captured_at = models.DateTimeField(null=True, editable=False)
    completed_at = models.DateTimeField(null=True, editable=False)
    cut = models.ForeignKey(
        Cut, models.SET_NULL, null=True, related_name="templates", editable=False
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    updated_at = models.DateTimeField(auto_now=True)

    objects = TemplateQuerySet.as_manager()

    class Meta:
        constraints = (
            models.UniqueConstraint(
                fields=["team", "template_id"],
                nulls_distinct=False,
                name="template_id_is_unique_in_a_team",
            ),
        )

    def __str__(self) -> str:
        return self.template_id

    @property
    def is_ready(self) -> bool:
        return self.generation_id is not None


class SandboxQuerySet(models.QuerySet["Sandbox"]):
    def of(self, team: Team) -> Self:
        return self.filter(team=team)

    def present(self) -> Self:
        """Return those that a client can still see."""
        return self.exclude(state=Sandbox.State.DELETED)

    def active(self) -> Self:
        """Return those that hold a place on a host, or are about to."""
        return self.filter(state__in=ACTIVE)

    def asleep(self) -> Self:
        return self.filter(state=Sandbox.State.PAUSED)


class Sandbox(models.Model):
    """A computer that a team can come back to.

    `state` says what was last known to be true, not what is wanted. Only `move_to` writes
    it, and `TRANSITIONS` lists every move there is:

        starting ──► running ──► pausing ──► paused ──► resuming ──► running
            │           │  ▲        │ │         ▲            │
            ▼           │  └────────┘ └─────────┴────────────┘   (a resume that failed)
          failed        └──► resuming                            (its guest died)

    and from each of them to terminating, then deleted. A sandbox that starts or resumes may
    do so anew, on another host: its own was lost.
    """

    class State(models.TextChoices):
        STARTING = "starting"
        RUNNING = "running"
        PAUSING = "pausing"
        PAUSED = "paused"
        RESUMING = "resuming"
        FAILED = "failed"
        TERMINATING = "terminating"
        DELETED = "deleted"

    class PauseReason(models.TextChoices):
        REQUEST = "request"
        TTL = "ttl"
        MEMORY = "memory", "memory was changed"

    id = models.CharField(max_length=55, primary_key=True, editable=False)
    uuid = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    team = models.ForeignKey(Team, models.PROTECT, related_name="sandboxes")
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+"
    )
    api_key = models.ForeignKey(ApiKey, models.SET_NULL, null=True, related_name="+")
    template = models.ForeignKey(Template, models.SET_NULL, null=True, related_name="sandboxes")
    template_name = models.CharField(max_length=255)
    volume = models.OneToOneField(Volume, models.PROTECT, related_name="sandbox")
    parent = models.ForeignKey(
        "self",
        models.SET_NULL,
        null=True,
        related_name="forks",
        editable=False,
        help_text="The sandbox that it was forked from.",
    )
    snapshot = models.ForeignKey(
        "Snapshot",
        models.SET_NULL,
        null=True,
        related_name="sandboxes",
        editable=False,
        help_text="What it was claimed from, or restored to last.",
    )

    state = models.CharField(max_length=12, choices=State, default=State.STARTING)
    state_changed_at = models.DateTimeField(default=timezone.now)
    pause_reason = models.CharField(max_length=10, choices=PauseReason, blank=True)
    resume_when_paused = models.BooleanField(default=False)
    last_error = models.CharField(max_length=300, blank=True)
    health = models.CharField(max_length=300, blank=True)

    runtime_generation = models.PositiveIntegerField(default=1)
    runtime_id = models.CharField(max_length=80, blank=True)
    host = models.ForeignKey(Host, models.PROTECT, null=True, related_name="sandboxes")
    address = models.GenericIPAddressField(protocol="IPv4", null=True)
    host_public_key = models.TextField(blank=True)

    memory_bytes = models.PositiveBigIntegerField()
    env_vars = models.JSONField(default=dict)
    ttl_s = models.PositiveIntegerField(default=0)
    hard_ttl_s = models.PositiveIntegerField(default=0)
    expires_at = models.DateTimeField(null=True)
    hard_expires_at = models.DateTimeField(null=True)
    auto_resume = models.BooleanField(default=True)

    claimed_at = models.DateTimeField(default=timezone.now)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    updated_at = models.DateTimeField(auto_now=True)
    started_at = models.DateTimeField(null=True)
    paused_at = models.DateTimeField(null=True)
    deleted_at = models.DateTimeField(null=True)

    objects = SandboxQuerySet.as_manager()

    class Meta:
        verbose_name_plural = "sandboxes"
        constraints = (
            models.CheckConstraint(
                name="running_sandbox_has_a_host",
                condition=~Q(state="running") | Q(host__isnull=False),
            ),
        )
        indexes = (
            models.Index(fields=["team", "-created_at"], name="sandbox_by_team"),
            models.Index(fields=["team", "state"], name="sandbox_by_state"),
            models.Index(
                fields=["expires_at"],
                name="sandbox_by_ttl",
                condition=Q(expires_at__isnull=False),
            ),
            models.Index(
                fields=["hard_expires_at"],
                name="sandbox_by_hard_ttl",
                condition=Q(hard_expires_at__isnull=False),
            ),
            models.Index(
                fields=["state", "state_changed_at"],
                name="sandbox_in_transition",
                condition=~Q(state__in=["paused", "deleted"]),
            ),
        )

    def __str__(self) -> str:
        return self.id

    @property
    def wire_status(self) -> str:
        """The state as clients know it, who see no `pausing` and no `resuming`."""
        return WIRE_STATUS[Sandbox.State(self.state)]

    @property
    def is_paused(self) -> bool:
        return self.state == Sandbox.State.PAUSED

    @property
    def memory_mib(self) -> int:
        return self.memory_bytes // MiB

    def move_to(self, state: State, **changes: object) -> None:
        """Change the state, and `changes` with it, if no one else has meanwhile.

        The row is written only where it still holds the state that this object was read
        with: of two processes that make the same move, one does and the other is refused.

        Raises:
            WrongState: there is no such move, or another process moved first.
        """
        if state not in TRANSITIONS[Sandbox.State(self.state)]:
            raise WrongState(self.state, state)

        now = timezone.now()
        changes |= {"state_changed_at": now, "updated_at": now}
        won = Sandbox.objects.filter(
            pk=self.pk, state=self.state, runtime_generation=self.runtime_generation
        ).update(state=state, **changes)
        if not won:
            self.refresh_from_db(fields=["state"])
            raise WrongState(self.state, state)

        self.state = state
        for name, value in changes.items():
            setattr(self, name, value)


ACTIVE = (
    Sandbox.State.STARTING,
    Sandbox.State.RUNNING,
    Sandbox.State.PAUSING,
    Sandbox.State.RESUMING,
)

_ENDS = {Sandbox.State.TERMINATING}
TRANSITIONS: dict[Sandbox.State, set[Sandbox.State]] = {
    Sandbox.State.STARTING: {
        Sandbox.State.STARTING,
        Sandbox.State.RUNNING,
        Sandbox.State.FAILED,
    }
    | _ENDS,
    Sandbox.State.RUNNING: {Sandbox.State.PAUSING, Sandbox.State.RESUMING} | _ENDS,
    Sandbox.State.PAUSING: {
        Sandbox.State.PAUSED,
        Sandbox.State.RUNNING,
        Sandbox.State.RESUMING,
    }
    | _ENDS,
    Sandbox.State.PAUSED: {Sandbox.State.RESUMING} | _ENDS,
    Sandbox.State.RESUMING: {
        Sandbox.State.RESUMING,
        Sandbox.State.RUNNING,
        Sandbox.State.PAUSED,
    }
    | _ENDS,
    Sandbox.State.FAILED: _ENDS,
    Sandbox.State.TERMINATING: {Sandbox.State.DELETED},
    Sandbox.State.DELETED: set(),
}

WIRE_STATUS = {
    Sandbox.State.STARTING: "starting",
    Sandbox.State.RUNNING: "running",
    Sandbox.State.PAUSING: "running",
    Sandbox.State.PAUSED: "paused",
    Sandbox.State.RESUMING: "starting",
    Sandbox.State.FAILED: "failed",
    Sandbox.State.TERMINATING: "terminating",
    Sandbox.State.DELETED: "terminating",
}


class Run(models.Model):
    """One life of a sandbox's guest, from ready to stopped."""

    sandbox = models.ForeignKey(Sandbox, models.CASCADE, related_name="runs")
    runtime_generation = models.PositiveIntegerField()
    host = models.ForeignKey(Host, models.PROTECT, related_name="+")
    memory_bytes = models.PositiveBigIntegerField()
    requested_at = models.DateTimeField()
    ready_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)
    end_reason = models.CharField(max_length=20, blank=True)
    fetched_bytes = models.PositiveBigIntegerField(default=0)

    class Meta:
        ordering = ("-runtime_generation",)
        constraints = (
            models.UniqueConstraint(
                fields=["sandbox", "runtime_generation"], name="generation_runs_once"
            ),
        )

    def __str__(self) -> str:
        return f"{self.sandbox_id}:{self.runtime_generation}"


class SnapshotQuerySet(models.QuerySet["Snapshot"]):
    def of(self, team: Team) -> Self:
        return self.filter(team=team)

    def present(self) -> Self:
        """Return those that a client can still see."""
        return self.filter(
            Q(expires_at=None) | Q(expires_at__gt=timezone.now()), deleted_at=None
        )


class Snapshot(models.Model):
    """A named generation of a sandbox's disk, kept until it is deleted or expires.

    It needs nothing of its sandbox, whose row stays for its name alone. A deleted one lets
    its generation go.
    """

    id = models.CharField(max_length=55, primary_key=True, editable=False)
    team = models.ForeignKey(Team, models.PROTECT, related_name="snapshots")
    sandbox = models.ForeignKey(Sandbox, models.PROTECT, related_name="snapshots")
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+"
    )
    name = models.CharField(max_length=255, blank=True)
    description = models.CharField(max_length=2000, blank=True)
    generation = models.ForeignKey(
        Generation, models.PROTECT, null=True, related_name="snapshots", editable=False
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    expires_at = models.DateTimeField(null=True)
    deleted_at = models.DateTimeField(null=True, editable=False)

    objects = SnapshotQuerySet.as_manager()

    class Meta:
        constraints = (
            models.CheckConstraint(
                name="present_snapshot_has_a_generation",
                condition=Q(deleted_at__isnull=False) | Q(generation__isnull=False),
            ),
        )
        indexes = (
            models.Index(fields=["sandbox", "-created_at"], name="snapshot_by_sandbox"),
            models.Index(fields=["team", "-created_at"], name="snapshot_by_team"),
            models.Index(
                fields=["expires_at"],
                name="snapshot_by_expiry",
                condition=Q(expires_at__isnull=False, deleted_at=None),
            ),
        )

    def __str__(self) -> str:
        return self.name or self.id


class FileView(models.Model):
    """A past generation of a sandbox that is open, or being opened, for its files.

    The volume is a disk of its own whose head is that generation, and which a host has
    attached; nothing that is written to it is ever kept.
    """

    sandbox = models.ForeignKey(Sandbox, models.CASCADE, related_name="file_views")
    generation = models.OneToOneField(
        Generation, models.PROTECT, related_name="file_view", editable=False
    )
    volume = models.OneToOneField(Volume, models.PROTECT, related_name="file_view")
    error = models.CharField(max_length=300, blank=True)
    created_at = models.DateTimeField(default=timezone.now)

    def __str__(self) -> str:
        return f"{self.sandbox_id}: {self.generation_id}"


class DiskSample(models.Model):
    """How full a sandbox's disk was at a moment, see `sandboxes.disk_samples`."""

    sandbox = models.ForeignKey(Sandbox, models.CASCADE, related_name="disk_samples")
    measured_at = models.DateTimeField(default=timezone.now)
    used_bytes = models.PositiveBigIntegerField()
    size_bytes = models.PositiveBigIntegerField()
    ceiling_bytes = models.PositiveBigIntegerField()
    stored_bytes = models.PositiveBigIntegerField()

    class Meta:
        ordering = ("-measured_at", "-pk")
        indexes = (
            models.Index(fields=["sandbox", "-measured_at", "-id"], name="disk_sample_by_time"),
        )

    def __str__(self) -> str:
        return f"{self.sandbox_id} {self.measured_at}"


class ClaimRecord(models.Model):
    """A request that carried an Idempotency-Key: the same key finds what it made before."""

    KEPT_DAYS: ClassVar[int] = 7

    team = models.ForeignKey(Team, models.CASCADE, related_name="+")
    key = models.CharField(max_length=255)
    body_digest = models.CharField(max_length=64)
    sandbox = models.ForeignKey(Sandbox, models.CASCADE, null=True, related_name="+")
    template = models.ForeignKey(Template, models.CASCADE, null=True, related_name="+")
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = (
            models.UniqueConstraint(
                fields=["team", "key"], name="idempotency_key_is_used_once_by_a_team"
            ),
        )

    def __str__(self) -> str:
        return self.key


def new_snapshot_id() -> str:
    """Return `rootfs-snapshot-<20 random>`."""
    return "rootfs-snapshot-" + "".join(secrets.choice(ID_ALPHABET) for _ in range(20))


def new_sandbox_id(cluster_key: str, template_id: str) -> str:
    """Return `rs-<cluster>-<template>-<5 random>`: a DNS label of at most 55 characters."""
    random = "".join(secrets.choice(ID_ALPHABET) for _ in range(5))
    room = 55 - len(f"rs-{cluster_key}--{random}")
    label = "".join(c if c.isalnum() and c.isascii() else "-" for c in template_id.lower())
    return f"rs-{cluster_key}-{label[:room].strip('-') or 'x'}-{random}"
