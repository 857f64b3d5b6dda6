"""Is this process alive, and can it work: for load balancers and `bin/up`."""

import logging
from typing import Any

from django.core.cache import cache
from django.db import DatabaseError, connection
from django.utils import timezone
from drf_spectacular.utils import extend_schema
from redis.exceptions import RedisError
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from common.api.envelope import ok
from common.api.schema import enveloped
from common.api.views import ApiView
from common.errors import Unavailable

log = logging.getLogger(__name__)


class NotReady(Unavailable):
    def __init__(self, service: str) -> None:
        super().__init__(service)
        self.service = service

    def __str__(self) -> str:
        return f"{self.service} does not answer."


class HealthBody(serializers.Serializer[Any]):
    status = serializers.CharField()
    timestamp = serializers.DateTimeField()


class MetadataBody(serializers.Serializer[Any]):
    gateway_mode = serializers.CharField()
    service = serializers.CharField()


class _OpenView(ApiView):
    """Answers anyone, and asks for no key."""

    authentication_classes = ()
    permission_classes = ()


@extend_schema(responses=enveloped("Health", HealthBody()))
class Alive(_OpenView):
    """`/healthz`: this process answers."""

    def get(self, request: Request) -> Response:
        return ok({"status": "ok", "timestamp": timezone.now()})


@extend_schema(responses=enveloped("Health", HealthBody()))
class Ready(_OpenView):
    """`/readyz`: so do PostgreSQL and Redis."""

    def get(self, request: Request) -> Response:
        try:
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1")
        except DatabaseError as error:
            log.warning("not ready: %s", error)
            raise NotReady("PostgreSQL") from error
        try:
            cache.get("ready")
        except RedisError as error:
            log.warning("not ready: %s", error)
            raise NotReady("Redis") from error
        return ok({"status": "ok", "timestamp": timezone.now()})


@extend_schema(responses=enveloped("Metadata", MetadataBody()))
class Metadata(_OpenView):
    """`/metadata`: which kind of gateway a client talks to."""

    def get(self, request: Request) -> Response:
        return ok({"gateway_mode": "direct", "service": "sandkeep"})
