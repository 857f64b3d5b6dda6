"""The ASGI application: HTTP to Django, websockets to the API's and the console's sockets."""

import os
import warnings
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")

import django
from channels.auth import AuthMiddlewareStack
from channels.routing import ProtocolTypeRouter, URLRouter
from django.urls import re_path

# Django must be set up before anything below imports a model.
django.setup(set_prefix=False)

from accounts.api.sockets import KeyRequired
from accounts.web.sockets import SameSiteOnly
from common.api.bodies import StreamingHandler
from common.api.routing import (
    ApiHandler,
    hold_no_thread,
    is_api_path,
    limit_bodies,
)
from common.api.sockets import Receive, Scope, Send, refuse
from sandboxes.api.routing import websocket_urlpatterns as api_sockets
from sandboxes.web.routing import websocket_urlpatterns as console_sockets

# WhiteNoise's files: a few hundred kilobytes each, so that reading one whole is no harm.
warnings.filterwarnings("ignore", "StreamingHttpResponse must consume synchronous iterators")

hold_no_thread()
api = ApiHandler()
console = StreamingHandler()


async def http(scope: Scope, receive: Receive, send: Send) -> None:
    """Send a request to the API's stack or the console's."""
    await (api if is_api_path(scope["path"]) else console)(scope, receive, send)


# Typed as Any: Django's own types of URL patterns know no ASGI applications.
unknown: Any = re_path("", refuse)  # type: ignore[arg-type]
api_routes: list[Any] = [*api_sockets, unknown]
console_routes: list[Any] = [*console_sockets, unknown]
api_router: Any = URLRouter(api_routes)
console_router: Any = AuthMiddlewareStack(URLRouter(console_routes))
api_websockets = KeyRequired(api_router)
console_websockets = SameSiteOnly(console_router)


async def websocket(scope: Scope, receive: Receive, send: Send) -> None:
    """Send a connection to the API's sockets or the console's, who check it differently."""
    chosen = api_websockets if is_api_path(scope["path"]) else console_websockets
    await chosen(scope, receive, send)


application = ProtocolTypeRouter({"http": limit_bodies(http), "websocket": websocket})
