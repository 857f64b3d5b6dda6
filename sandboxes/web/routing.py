"""WebSocket paths of `sandboxes/web`; who may connect is checked in `config.asgi`."""

from django.urls import URLPattern

websocket_urlpatterns: list[URLPattern] = []
