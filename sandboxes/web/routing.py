"""WebSocket paths of the console; `config.asgi` checks their origin and reads the session."""

from django.urls import path

from sandboxes.consumers import LiveConsumer, TerminalConsumer

# `path` knows views only; that these are ASGI applications is what `URLRouter` wants.
websocket_urlpatterns = [
    path("ws/teams/<uuid:team_id>/live", LiveConsumer.as_asgi()),  # type: ignore[arg-type]
    path("ws/sandboxes/<str:sandbox_id>/terminal", TerminalConsumer.as_asgi()),  # type: ignore[arg-type]
]
