"""Views that answer, fail and read bodies, under paths of the API."""

import asyncio
from typing import ClassVar

from django.urls import include, path
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.api.views import AsyncTeamView, TeamView
from common.api.envelope import ok
from common.api.serializers import StrictSerializer
from common.errors import Refused, Unavailable


class Full(Refused):
    code = "quota_exceeded"
    status = 429

    def __str__(self) -> str:
        return "Full."


class Asleep(Unavailable):
    retry_after_s = 1.2

    def __str__(self) -> str:
        return "Asleep."


FAILURES = {"refused": Full, "unavailable": Asleep, "bug": ZeroDivisionError}


class Limits(StrictSerializer):
    ttl = serializers.IntegerField(min_value=0, required=False)
    made = serializers.IntegerField(read_only=True)


class Body(StrictSerializer):
    name = serializers.CharField()
    limits = Limits(required=False)
    more = Limits(many=True, required=False)
    tags = serializers.ListField(child=serializers.CharField(), required=False)
    open = serializers.BooleanField(required=False)


class Sample(TeamView):
    required_permission: ClassVar = {"GET": "sandbox:read", "POST": "sandbox:read"}

    def get(self, request: Request) -> Response:
        if failure := FAILURES.get(request.query_params.get("fail", "")):
            raise failure
        return ok({"team": str(self.team.pk)})

    def post(self, request: Request) -> Response:
        body = Body(data=request.data)
        body.is_valid(raise_exception=True)
        return ok(body.validated_data, 201)


class AsyncSample(AsyncTeamView):
    required_permission: ClassVar = {"GET": "sandbox:read", "POST": "sandbox:create"}

    async def get(self, request: Request) -> Response:
        await asyncio.sleep(0)
        if failure := FAILURES.get(request.query_params.get("fail", "")):
            raise failure
        return ok({"team": str(self.team.pk)})

    async def post(self, request: Request) -> Response:
        body = Body(data=request.data)
        body.is_valid(raise_exception=True)
        return ok(body.validated_data, 201)


urlpatterns = [
    path("api/v1/sample", Sample.as_view()),
    path("api/v1/async-sample", AsyncSample.as_view()),
    path("", include("config.urls")),
]
