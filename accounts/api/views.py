"""The bases of every view that acts for a team, and the endpoints of accounts."""

from typing import Any, ClassVar
from uuid import UUID

from drf_spectacular.utils import extend_schema
from rest_framework.exceptions import NotFound, PermissionDenied
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from accounts.api import schema
from accounts.api.authentication import KeyHolder
from accounts.api.serializers import (
    ApiKeyBody,
    CurrentApiKeyBody,
    NewApiKey,
    TeamBody,
    UserBody,
)
from accounts.models import ApiKey, Team
from accounts.permissions import ANY_MEMBER, PERMISSIONS
from accounts.services import (
    Doer,
    add_pending_uses,
    create_api_key,
    deactivate_api_key,
    delete_api_key,
)
from common.api.envelope import ok
from common.api.views import ApiView, AsyncApiView

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


class HasPermission(BasePermission):
    """Lets a key do what its roles allow, by the view's `required_permission`."""

    def has_permission(self, request: Request, view: APIView) -> bool:
        if not isinstance(request.user, KeyHolder):
            return False
        assert isinstance(view, TeamView)
        method = "GET" if request.method == "HEAD" else request.method or ""
        wanted = view.required_permission.get(method)
        # Without one the view has no such method, and answers 405.
        if wanted is not None and not request.user.may(wanted):
            roles = ", ".join(request.user.key.roles)
            raise PermissionDenied(
                f"This needs the permission {wanted}, which the key's roles ({roles}) lack."
            )
        return True


class TeamView(ApiView):
    """A view that only an API key can reach; `self.team` is the key's team."""

    required_permission: ClassVar[dict[str, str]] = {}
    """The permission that each method needs, by its name in capitals."""

    permission_classes = (HasPermission,)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a view that forgot to say what a method of it requires."""
        super().__init_subclass__(**kwargs)
        handled = {method for method in METHODS if hasattr(cls, method.lower())}
        if missing := handled - cls.required_permission.keys():
            raise TypeError(f"{cls.__name__}: no required_permission for {sorted(missing)}")
        if unknown := set(cls.required_permission.values()) - PERMISSIONS - {ANY_MEMBER}:
            raise TypeError(f"{cls.__name__}: there is no permission {sorted(unknown)}")

    @property
    def holder(self) -> KeyHolder:
        assert isinstance(self.request.user, KeyHolder)
        return self.request.user

    @property
    def team(self) -> Team:
        return self.holder.team

    @property
    def key(self) -> ApiKey:
        return self.holder.key

    @property
    def doer(self) -> Doer:
        """The key as the one who does what this request asks for."""
        return Doer(
            user=self.holder.user,
            api_key=self.key,
            source_ip=self.request.META.get("REMOTE_ADDR"),
        )


class AsyncTeamView(AsyncApiView, TeamView):
    """The same for handlers that wait."""


class Me(TeamView):
    """`/users/me`: who made the calling key.

    Until users can sign in to the API itself a key may read this, and change nothing.
    """

    required_permission: ClassVar = {"GET": ANY_MEMBER, "PUT": ANY_MEMBER}

    @extend_schema(responses=schema.USER)
    def get(self, request: Request) -> Response:
        return ok(UserBody(self.holder.user).data)

    @extend_schema(exclude=True)
    def put(self, request: Request) -> Response:
        raise PermissionDenied("An API key cannot change who made it. Use the console.")


class Teams(TeamView):
    """`/teams`: the teams that the key can see, which is its own."""

    required_permission: ClassVar = {"GET": "team:read"}

    @extend_schema(responses=schema.TEAMS)
    def get(self, request: Request) -> Response:
        return ok({"teams": [TeamBody(self.team).data]})


class TeamDetail(TeamView):
    """`/teams/{id}`: the key's team; any other is not found."""

    required_permission: ClassVar = {"GET": "team:read"}

    @extend_schema(responses=schema.TEAM)
    def get(self, request: Request, team_id: UUID) -> Response:
        if team_id != self.team.pk:
            raise NotFound("No such team.")
        return ok(TeamBody(self.team).data)


class ApiKeys(TeamView):
    """`/api-keys`: the team's keys, newest first."""

    required_permission: ClassVar = {"GET": "apikey:read", "POST": "apikey:create"}

    @extend_schema(responses=schema.KEYS)
    def get(self, request: Request) -> Response:
        keys = add_pending_uses(ApiKey.objects.of(self.team).order_by("-created_at"))
        return ok({"api_keys": ApiKeyBody(keys, many=True).data})

    @extend_schema(request=NewApiKey, responses={201: schema.NEW_KEY})
    def post(self, request: Request) -> Response:
        body = NewApiKey(data=request.data)
        body.is_valid(raise_exception=True)
        wanted = body.validated_data
        key, secret = create_api_key(
            team=self.team,
            created_by=self.holder.user,
            held_roles=self.key.roles,
            name=wanted["name"],
            roles=wanted["roles"],
            expires_in=wanted["expires_in"],
            api_key=self.key,
            source_ip=request.META.get("REMOTE_ADDR"),
        )
        return ok(ApiKeyBody(key).data | {"key": secret}, 201)


class CurrentApiKey(TeamView):
    """`/api-keys/current`: what the calling key is and may do."""

    required_permission: ClassVar = {"GET": ANY_MEMBER}

    @extend_schema(responses=schema.CURRENT_KEY)
    def get(self, request: Request) -> Response:
        return ok({"api_key": CurrentApiKeyBody(self.key).data})


class ApiKeyDetail(TeamView):
    """`/api-keys/{id}`: one key of the team."""

    required_permission: ClassVar = {"DELETE": "apikey:delete"}

    @extend_schema(responses=schema.DONE)
    def delete(self, request: Request, key_id: UUID) -> Response:
        delete_api_key(
            key=_key_of(self.team, key_id),
            api_key=self.key,
            source_ip=request.META.get("REMOTE_ADDR"),
        )
        return ok({"message": "The key is deleted."})


class ApiKeyDeactivate(TeamView):
    """`/api-keys/{id}/deactivate`: close a key, and keep it in the list."""

    required_permission: ClassVar = {"POST": "apikey:write"}

    @extend_schema(request=None, responses=schema.DONE)
    def post(self, request: Request, key_id: UUID) -> Response:
        deactivate_api_key(
            key=_key_of(self.team, key_id),
            api_key=self.key,
            source_ip=request.META.get("REMOTE_ADDR"),
        )
        return ok({"message": "The key is deactivated."})


def _key_of(team: Team, key_id: UUID) -> ApiKey:
    key = ApiKey.objects.of(team).select_related("team").filter(pk=key_id).first()
    if key is None:
        raise NotFound("No such API key.")
    return key
