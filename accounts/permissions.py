"""What each role may do. Pure: no database, no settings.

Source: features, "Teams and roles".
"""

from collections.abc import Iterable

PERMISSIONS = frozenset(
    {
        "apikey:create",
        "apikey:delete",
        "apikey:read",
        "apikey:write",
        "audit:read",
        "quota:read",
        "sandbox:create",
        "sandbox:delete",
        "sandbox:read",
        "sandbox:write",
        "team:read",
        "team:write",
        "template:create",
        "template:delete",
        "template:read",
        "template:write",
        "usage:read",
    }
)
"""Every permission there is, as `<object>:<act>`."""

ANY_MEMBER = "any"
"""What a view requires that is open to everyone in the team."""

_VIEWER = {"quota:read", "sandbox:read", "team:read", "template:read", "usage:read"}

BY_ROLE: dict[str, frozenset[str]] = {
    "admin": PERMISSIONS,
    "developer": frozenset(
        _VIEWER | {"sandbox:create", "sandbox:delete", "sandbox:write"},
    ),
    "builder": frozenset({"team:read", "template:read"}),
    "viewer": frozenset(_VIEWER),
}


def permissions_of(roles: Iterable[str]) -> frozenset[str]:
    """Return all that these roles together may do."""
    return frozenset().union(*(BY_ROLE[role] for role in roles))


def may(roles: Iterable[str], permission: str) -> bool:
    """Say whether one of the roles holds the permission."""
    if permission == ANY_MEMBER:
        return True
    if permission not in PERMISSIONS:
        raise ValueError(f"there is no permission {permission!r}")
    return permission in permissions_of(roles)


def within(roles: Iterable[str], held: Iterable[str]) -> bool:
    """Say whether `roles` allow nothing that `held` do not."""
    return permissions_of(roles) <= permissions_of(held)
