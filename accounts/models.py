"""Users, teams, who is in which, and the teams' API keys."""

import hashlib
import secrets
import uuid
from datetime import datetime, timedelta
from typing import Any, ClassVar, Self

from django.conf import settings
from django.contrib.auth.models import AbstractUser, BaseUserManager
from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models.functions import Lower
from django.utils import timezone

DEFAULT_RUNNING_LIMIT = 20
DEFAULT_PAUSED_LIMIT = 2_000
# A key that lives longer was made to last for ever; clients want a time all the same.
LONGEST_LIFETIME = timedelta(days=366)


class UserManager(BaseUserManager["User"]):
    def create_user(self, email: str, password: str | None = None, **fields: Any) -> "User":
        user = self.model(email=self.normalize_email(email).lower(), **fields)
        user.set_password(password)
        user.save(using=self._db)
        return user

    def create_superuser(self, email: str, password: str | None = None) -> "User":
        return self.create_user(email, password, is_staff=True, is_superuser=True)


class User(AbstractUser):
    """A person. Signs in with an e-mail address, which is unique whatever its case."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    username = None  # type: ignore[assignment]
    first_name = None  # type: ignore[assignment]
    last_name = None  # type: ignore[assignment]
    email = models.EmailField(unique=True)
    name = models.CharField(max_length=120, blank=True)
    avatar_url = models.URLField(blank=True)
    updated_at = models.DateTimeField(auto_now=True)

    USERNAME_FIELD = "email"
    REQUIRED_FIELDS: ClassVar[list[str]] = []

    objects: ClassVar[UserManager] = UserManager()  # type: ignore[assignment]

    class Meta:
        constraints = (
            models.UniqueConstraint(Lower("email"), name="user_email_is_unique_in_any_case"),
        )

    def __str__(self) -> str:
        return self.email

    def get_full_name(self) -> str:
        return self.name or self.email

    def get_short_name(self) -> str:
        return self.name or self.email.partition("@")[0]


class Role(models.TextChoices):
    """What a member or a key may do, strongest first."""

    ADMIN = "admin"
    DEVELOPER = "developer"
    BUILDER = "builder"
    VIEWER = "viewer"


class Team(models.Model):
    """The unit that owns sandboxes and pays for them."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=80)
    slug = models.SlugField(max_length=80)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.PROTECT, null=True, related_name="owned_teams"
    )
    home_region_id = models.CharField(max_length=40, blank=True)
    members = models.ManyToManyField(
        settings.AUTH_USER_MODEL, through="Membership", related_name="teams"
    )
    running_limit = models.PositiveIntegerField(default=DEFAULT_RUNNING_LIMIT)
    paused_limit = models.PositiveIntegerField(default=DEFAULT_PAUSED_LIMIT)
    disk_limit_bytes = models.PositiveBigIntegerField(
        default=0,
        db_default=0,
        help_text="How large a sandbox's disk may become; 0 is as large as its template's.",
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    updated_at = models.DateTimeField(auto_now=True)

    def __str__(self) -> str:
        return self.name


class Membership(models.Model):
    """A user's place in a team."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    team = models.ForeignKey(Team, models.CASCADE, related_name="memberships")
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.CASCADE, related_name="memberships"
    )
    role = models.CharField(max_length=10, choices=Role)
    joined_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        constraints = (
            models.UniqueConstraint(
                fields=["team", "user"], name="user_is_in_a_team_at_most_once"
            ),
        )

    def __str__(self) -> str:
        return f"{self.user_id} in {self.team_id} as {self.role}"


class ApiKeyQuerySet(models.QuerySet["ApiKey"]):
    def of(self, team: Team) -> Self:
        return self.filter(team=team)

    def usable(self, at: datetime) -> Self:
        """Return the keys that open doors at this moment."""
        return self.filter(is_active=True, expires_at__gt=at)

    def find(self, secret: str) -> "ApiKey | None":
        """Return the usable key with this secret, its team and maker along with it."""
        usable = self.usable(timezone.now()).select_related("team", "created_by")
        try:
            return usable.get(digest=digest_of(secret))
        except self.model.DoesNotExist:
            return None


class ApiKey(models.Model):
    """A secret that lets a program act for a team, within its roles.

    The secret, `s0_<region>_<48 hex>`, is shown once; what is kept is its digest. It has 192
    bits of entropy, so a fast unsalted digest is safe to look up by.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    team = models.ForeignKey(Team, models.CASCADE, related_name="api_keys")
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, related_name="+")
    name = models.CharField(max_length=80)
    digest = models.CharField(max_length=64, unique=True, editable=False)
    hint = models.CharField(max_length=24, editable=False)
    roles = ArrayField(models.CharField(max_length=10, choices=Role))
    is_active = models.BooleanField(default=True)
    expires_at = models.DateTimeField()
    last_used_at = models.DateTimeField(null=True, editable=False)
    usage_count = models.PositiveBigIntegerField(default=0, editable=False)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    updated_at = models.DateTimeField(auto_now=True)

    objects = ApiKeyQuerySet.as_manager()

    class Meta:
        indexes = (models.Index(fields=["team", "created_at"], name="api_key_by_team"),)

    def __str__(self) -> str:
        return f"{self.name} ({self.hint})"

    @property
    def never_expires(self) -> bool:
        return self.expires_at - self.created_at > LONGEST_LIFETIME


class AuditEvent(models.Model):
    """Who did what to which object of a team. Written once, never changed."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    team = models.ForeignKey(Team, models.CASCADE, related_name="audit_events")
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+"
    )
    api_key = models.ForeignKey(ApiKey, models.SET_NULL, null=True, related_name="+")
    action = models.CharField(max_length=60)
    resource_type = models.CharField(max_length=40)
    resource_id = models.CharField(max_length=80)
    attributes = models.JSONField(default=dict)
    source_ip = models.GenericIPAddressField(null=True)
    at = models.DateTimeField(default=timezone.now)

    class Meta:
        indexes = (models.Index(fields=["team", "-at"], name="audit_event_by_team"),)

    def __str__(self) -> str:
        return f"{self.action} {self.resource_id}"


def new_secret(region: str) -> str:
    """Return a fresh API key secret."""
    return f"s0_{region}_{secrets.token_hex(24)}"


def digest_of(secret: str) -> str:
    """Return what is stored of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()
