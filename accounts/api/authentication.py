"""API-key authentication: `Authorization: Bearer s0_<region>_<48 hex>`."""

import re

from django.contrib.auth.models import AnonymousUser
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.exceptions import AuthenticationFailed, PermissionDenied
from rest_framework.request import Request

from accounts.models import ApiKey, Team, User
from accounts.permissions import may, permissions_of
from accounts.services import count_use

SECRET = re.compile(r"s0_[a-z0-9-]{1,40}_[0-9a-f]{48}")


class KeyHolder(AnonymousUser):
    """A program that acts for a team: authenticated, yet no one person."""

    def __init__(self, key: ApiKey) -> None:
        self.key = key

    @property
    def is_authenticated(self) -> bool:  # type: ignore[override]
        return True

    @property
    def team(self) -> Team:
        return self.key.team

    @property
    def user(self) -> User:
        """Who made the key."""
        return self.key.created_by

    @property
    def permissions(self) -> frozenset[str]:
        return permissions_of(self.key.roles)

    def may(self, permission: str) -> bool:
        return may(self.key.roles, permission)


class ApiKeyAuthentication(BaseAuthentication):
    """Looks the key up at every request, so that one just deactivated opens nothing."""

    def authenticate(self, request: Request) -> tuple[KeyHolder, ApiKey] | None:
        scheme, _, secret = get_authorization_header(request).decode("latin-1").partition(" ")
        if scheme.lower() != "bearer":
            return None

        key = usable_key(secret)
        if key is None:
            raise AuthenticationFailed("This API key is unknown, expired or deactivated.")
        _refuse_other_team(request.headers.get("X-Team-ID", ""), key)
        count_use(key)
        return KeyHolder(key), key

    def authenticate_header(self, request: Request) -> str:
        return 'Bearer realm="api"'


def usable_key(secret: str) -> ApiKey | None:
    """Return the key with this secret, if it opens doors at this moment."""
    secret = secret.strip()
    if not SECRET.fullmatch(secret):
        return None
    key = ApiKey.objects.find(secret)
    return key if key and key.created_by.is_active else None


def _refuse_other_team(wanted: str, key: ApiKey) -> None:
    # Acting for the key's team when another was asked for would be a bad surprise.
    if wanted and wanted.lower() != str(key.team_id):
        raise PermissionDenied("This API key does not belong to the team in X-Team-ID.")
