"""Bodies of the endpoints of accounts.

Source: wire contract, Appendix A.
"""

from typing import Any

from allauth.account.models import EmailAddress
from rest_framework import serializers

from accounts.models import ApiKey, Role, Team, User
from accounts.permissions import permissions_of
from accounts.services import DEFAULT_LIFETIME, LIFETIMES
from common.api.serializers import StrictSerializer


class UserBody(serializers.ModelSerializer[User]):
    email_verified = serializers.SerializerMethodField()
    is_admin = serializers.BooleanField(source="is_staff")
    created_at = serializers.DateTimeField(source="date_joined")
    avatar_url = serializers.SerializerMethodField()

    class Meta:
        model = User
        fields = (
            "id",
            "email",
            "name",
            "email_verified",
            "is_admin",
            "created_at",
            "updated_at",
            "avatar_url",
        )

    def get_email_verified(self, user: User) -> bool:
        addresses = EmailAddress.objects.filter(user=user, verified=True)
        return bool(addresses.filter(email__iexact=user.email).exists())

    def get_avatar_url(self, user: User) -> str | None:
        return user.avatar_url or None


class TeamBody(serializers.ModelSerializer[Team]):
    home_region_id = serializers.SerializerMethodField()

    class Meta:
        model = Team
        fields = (
            "id",
            "name",
            "slug",
            "owner_id",
            "home_region_id",
            "created_at",
            "updated_at",
        )

    def get_home_region_id(self, team: Team) -> str | None:
        return team.home_region_id or None


class NewApiKey(StrictSerializer):
    name = serializers.CharField(max_length=80)
    scope = serializers.ChoiceField(["team"], default="team")
    roles = serializers.ListField(
        child=serializers.ChoiceField(Role.choices),
        default=lambda: [Role.DEVELOPER],
        allow_empty=False,
        max_length=len(Role),
    )
    expires_in = serializers.ChoiceField(list(LIFETIMES), default=DEFAULT_LIFETIME)


class ApiKeyBody(serializers.ModelSerializer[ApiKey]):
    scope = serializers.SerializerMethodField()
    created_by = serializers.CharField(source="created_by_id")
    user_id = serializers.CharField(source="created_by_id")

    class Meta:
        model = ApiKey
        fields = (
            "id",
            "team_id",
            "created_by",
            "user_id",
            "name",
            "scope",
            "roles",
            "is_active",
            "hint",
            "expires_at",
            "created_at",
            "updated_at",
            "last_used_at",
            "usage_count",
        )

    def get_scope(self, key: ApiKey) -> str:
        return "team"

    def to_representation(self, instance: ApiKey) -> dict[str, Any]:
        body = super().to_representation(instance)
        if body["last_used_at"] is None:
            # The published client takes an absent time, and breaks on a null one.
            del body["last_used_at"]
        return body


class CurrentApiKeyBody(ApiKeyBody):
    permissions = serializers.SerializerMethodField()

    class Meta:
        model = ApiKey
        fields = (
            "id",
            "team_id",
            "created_by",
            "name",
            "scope",
            "roles",
            "permissions",
            "is_active",
            "expires_at",
        )

    def get_permissions(self, key: ApiKey) -> list[str]:
        return sorted(permissions_of(key.roles))

    def to_representation(self, instance: ApiKey) -> dict[str, Any]:
        return serializers.ModelSerializer.to_representation(self, instance)
