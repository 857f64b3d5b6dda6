"""The site with a view that waits, for a server process of its own."""

import asyncio
import threading
from typing import ClassVar

from django.urls import include, path
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.api.views import AsyncTeamView
from common.api.envelope import ok

released = asyncio.Event()


class Wait(AsyncTeamView):
    """Waits until it is told to go on."""

    waiting: ClassVar = 0

    required_permission: ClassVar = {"GET": "sandbox:read", "POST": "sandbox:read"}

    async def get(self, request: Request) -> Response:
        Wait.waiting += 1
        await released.wait()
        return ok({"waited": True})

    async def post(self, request: Request) -> Response:
        released.set()
        return ok({"released": Wait.waiting})


class Report(AsyncTeamView):
    """Says how many wait, and how many threads that takes."""

    required_permission: ClassVar = {"GET": "sandbox:read"}

    async def get(self, request: Request) -> Response:
        return ok({"waiting": Wait.waiting, "threads": threading.active_count()})


urlpatterns = [
    path("api/v1/wait", Wait.as_view()),
    path("api/v1/report", Report.as_view()),
    path("", include("config.urls")),
]
