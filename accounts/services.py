"""What callers may ask of accounts: teams, keys, and the record of who did what."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from typing import Final

from django.conf import settings
from django.core.cache import cache
from django.db import transaction
from django.db.models import F
from django.utils import timezone
from django.utils.text import slugify
from redis.exceptions import RedisError

from accounts.closing import announce_closed
from accounts.errors import RolesExceedYours
from accounts.models import (
    ApiKey,
    AuditEvent,
    Membership,
    Role,
    Team,
    User,
    digest_of,
    new_secret,
)
from accounts.permissions import within

log = logging.getLogger(__name__)

LIFETIMES: Final = {
    "30d": timedelta(days=30),
    "90d": timedelta(days=90),
    "180d": timedelta(days=180),
    "365d": timedelta(days=365),
    "never": timedelta(days=36_525),  # a hundred years: clients want a time
}
DEFAULT_LIFETIME: Final = "90d"
HINT_LENGTH: Final = 6

# A key in a tight loop must not cost a write for each request.
USE_WRITTEN_EVERY_S: Final = 5


def create_first_team(user: User) -> Team:
    """Give the user a team, named after them, unless they are in one already.

    Safe to repeat, also at once: the user's row is locked.
    """
    with transaction.atomic():
        User.objects.select_for_update().get(pk=user.pk)
        membership = user.memberships.select_related("team").order_by("joined_at").first()
        if membership:
            return membership.team
        name = f"{user.get_short_name()[:70]}'s team"
        return create_team(name=name, owner=user)


def create_team(*, name: str, owner: User) -> Team:
    """Create a team whose owner is its first admin."""
    with transaction.atomic():
        team = Team.objects.create(
            name=name,
            slug=slugify(name)[:80] or "team",
            owner=owner,
            home_region_id=settings.REGION_ID,
        )
        Membership.objects.create(team=team, user=owner, role=Role.ADMIN)
    return team


def create_api_key(
    *,
    team: Team,
    created_by: User,
    held_roles: Iterable[str],
    name: str,
    roles: Iterable[str],
    expires_in: str = DEFAULT_LIFETIME,
    api_key: ApiKey | None = None,
    source_ip: str | None = None,
) -> tuple[ApiKey, str]:
    """Make a key for the team. Returns it with its secret, which is kept nowhere.

    Args:
        held_roles: the roles of whoever asks: a member, or another key.
        expires_in: one of LIFETIMES.
        api_key: the key that asked, if it was no person.

    Raises:
        RolesExceedYours: the key could do more than whoever asks.
    """
    roles = sorted(set(roles))
    if not within(roles, held_roles):
        raise RolesExceedYours
    secret = new_secret(settings.REGION_ID)
    with transaction.atomic():
        key = ApiKey.objects.create(
            team=team,
            created_by=created_by,
            name=name,
            digest=digest_of(secret),
            hint=f"…{secret[-HINT_LENGTH:]}",
            roles=roles,
            expires_at=timezone.now() + LIFETIMES[expires_in],
        )
        record_event(
            team=team,
            user=created_by if api_key is None else None,
            api_key=api_key,
            action="api_key.create",
            resource_type="api_key",
            resource_id=str(key.id),
            attributes={"name": name, "roles": roles},
            source_ip=source_ip,
        )
    return key, secret


def deactivate_api_key(
    *,
    key: ApiKey,
    user: User | None = None,
    api_key: ApiKey | None = None,
    source_ip: str | None = None,
) -> None:
    """Close a key for good: it fails at the very next request, and its sockets end.

    Safe to repeat.
    """
    with transaction.atomic():
        changed = ApiKey.objects.filter(pk=key.pk, is_active=True).update(
            is_active=False, updated_at=timezone.now()
        )
        if changed:
            announce_closed(key)
            _record_key_event("api_key.deactivate", key, user, api_key, source_ip)
    key.is_active = False


def delete_api_key(
    *,
    key: ApiKey,
    user: User | None = None,
    api_key: ApiKey | None = None,
    source_ip: str | None = None,
) -> None:
    """Forget a key. It fails at the very next request; what it did stays in the record."""
    with transaction.atomic():
        # A key that deletes itself cannot be named as the one that did.
        actor = api_key if api_key and api_key.pk != key.pk else None
        _record_key_event("api_key.delete", key, user, actor, source_ip)
        ApiKey.objects.filter(pk=key.pk).delete()
        announce_closed(key)


def _record_key_event(
    action: str, key: ApiKey, user: User | None, api_key: ApiKey | None, source_ip: str | None
) -> None:
    record_event(
        team=key.team,
        user=user,
        api_key=api_key,
        action=action,
        resource_type="api_key",
        resource_id=str(key.id),
        attributes={"name": key.name, "hint": key.hint},
        source_ip=source_ip,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Doer:
    """Who does something: a person, or a program with a key; neither is the platform."""

    user: User | None = None
    api_key: ApiKey | None = None
    source_ip: str | None = None


def record_event(
    *,
    team: Team,
    action: str,
    resource_type: str,
    resource_id: str,
    user: User | None = None,
    api_key: ApiKey | None = None,
    attributes: dict[str, object] | None = None,
    source_ip: str | None = None,
) -> AuditEvent:
    """Record who did what, in the transaction that does it.

    Args:
        action: `<object>.<act>`, such as "sandbox.pause".
        attributes: what else is worth knowing; JSON, small, and never a secret.
        source_ip: as the request has it; anything that is no address is left out.
    """
    return AuditEvent.objects.create(
        team=team,
        user=user,
        api_key=api_key,
        action=action,
        resource_type=resource_type,
        resource_id=resource_id,
        attributes=attributes or {},
        source_ip=_address(source_ip),
    )


def _address(source_ip: str | None) -> str | None:
    try:
        return str(ip_address(source_ip or ""))
    except ValueError:
        return None


def count_use(key: ApiKey) -> None:
    """Count a use of the key, and note when it was.

    Uses gather in the cache, and go to the row every few seconds while the key is in use.
    Without a cache they are not counted: a key must open doors all the same.
    """
    try:
        if not cache.add(f"key-written:{key.pk}", 1, USE_WRITTEN_EVERY_S):
            _count_later(key)
            return
        waiting = cache.get(_pending(key), 0)
        ApiKey.objects.filter(pk=key.pk).update(
            usage_count=F("usage_count") + 1 + waiting, last_used_at=timezone.now()
        )
        if waiting:
            cache.decr(_pending(key), waiting)
    except (RedisError, ValueError) as error:  # ValueError: the counter was evicted
        log.warning("a use of key %s is not counted: %s", key.pk, error)


def _count_later(key: ApiKey) -> None:
    try:
        cache.incr(_pending(key))
    except ValueError:  # there is no counter yet, or it was evicted
        if not cache.add(_pending(key), 1, None):
            cache.incr(_pending(key))


def add_pending_uses(keys: Iterable[ApiKey]) -> list[ApiKey]:
    """Return the keys with those uses added that are not in their rows yet."""
    keys = list(keys)
    try:
        waiting = cache.get_many([_pending(key) for key in keys])
    except RedisError as error:
        log.warning("uses that wait in the cache are not shown: %s", error)
        return keys
    for key in keys:
        key.usage_count += waiting.get(_pending(key), 0)
    return keys


def _pending(key: ApiKey) -> str:
    return f"key-uses:{key.pk}"
