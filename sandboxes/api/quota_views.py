"""Quotas: what a team may have, and has."""

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.api.views import TeamView
from common.api.envelope import ok
from sandboxes.api import schema
from sandboxes.api.bodies import QUOTA_DIMENSIONS, quota_bodies


class QuotaList(TeamView):
    """`/quotas`."""

    required_permission = {"GET": "quota:read"}  # noqa: RUF012

    @extend_schema(
        summary="List quotas",
        responses={200: schema.enveloped("QuotaList", schema.Quota(many=True))}
        | schema.refusals(403),
    )
    def get(self, request: Request) -> Response:
        return ok(quota_bodies(self.team))


class QuotaDetail(TeamView):
    """`/quotas/<dimension>`."""

    required_permission = {"GET": "quota:read"}  # noqa: RUF012

    @extend_schema(
        summary="Show a quota",
        responses={200: schema.enveloped("Quota", schema.Quota())} | schema.refusals(400, 403),
    )
    def get(self, request: Request, dimension: str) -> Response:
        if dimension not in QUOTA_DIMENSIONS:
            names = ", ".join(QUOTA_DIMENSIONS)
            raise serializers.ValidationError({"dimension": [f"It is one of {names}."]})
        bodies = {body["dimension"]: body for body in quota_bodies(self.team)}
        return ok(bodies[dimension])
