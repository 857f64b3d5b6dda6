"""WebSocket paths of the API; `config.asgi` lets only usable keys in."""

from django.urls import path

from sandboxes.api.sockets import context_socket

websocket_urlpatterns = [
    path(
        "api/v1/sandboxes/<str:sandbox_id>/contexts/<str:context_id>/ws",
        context_socket,  # type: ignore[arg-type]  # an ASGI application, as URLRouter takes it
    ),
]
