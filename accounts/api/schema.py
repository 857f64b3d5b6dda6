"""What the published schema says of the endpoints of accounts."""

from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from rest_framework import serializers

from accounts.api.serializers import ApiKeyBody, CurrentApiKeyBody, TeamBody, UserBody
from accounts.models import ApiKey
from common.api.schema import enveloped


class ApiKeyScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    """Tells that requests carry an API key as a bearer token."""

    target_class = "accounts.api.authentication.ApiKeyAuthentication"
    name = "ApiKey"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {
            "type": "http",
            "scheme": "bearer",
            "description": "An API key of a team: `s0_<region>_<48 hex digits>`.",
        }


class NewKeyBody(ApiKeyBody):
    key = serializers.CharField(help_text="The secret. It is shown this once.")

    class Meta:
        model = ApiKey
        fields = (*ApiKeyBody.Meta.fields, "key")


class KeyList(serializers.Serializer[Any]):
    api_keys = ApiKeyBody(many=True)


class CurrentKey(serializers.Serializer[Any]):
    api_key = CurrentApiKeyBody()


class TeamList(serializers.Serializer[Any]):
    teams = TeamBody(many=True)


class MessageBody(serializers.Serializer[Any]):
    message = serializers.CharField()


USER = enveloped("User", UserBody())
TEAM = enveloped("Team", TeamBody())
TEAMS = enveloped("TeamList", TeamList())
KEYS = enveloped("ApiKeyList", KeyList())
NEW_KEY = enveloped("NewApiKey", NewKeyBody())
CURRENT_KEY = enveloped("CurrentApiKey", CurrentKey())
DONE = enveloped("AccountMessage", MessageBody())
