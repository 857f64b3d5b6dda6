"""The console's WebSockets are for pages of this site alone.

A browser sends cookies with any page's WebSocket, so the page's origin must be checked; a
sandbox's own page may run on another port of the same host, so host alone is not enough.
"""

from urllib.parse import urlsplit

from django.conf import settings
from django.http.request import split_domain_port, validate_host

from common.api.sockets import Application, Receive, Scope, Send, refuse_with


class SameSiteOnly:
    """ASGI middleware: refuses an upgrade that no page of this site asked for."""

    def __init__(self, application: Application) -> None:
        self.application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if not is_same_site(headers.get(b"origin", ""), headers.get(b"host", "")):
            message = "This socket is for pages of the console."
            await refuse_with(scope, send, 403, "forbidden", message, close_code=4403)
            return
        await self.application(scope, receive, send)


def is_same_site(origin: str, host: str) -> bool:
    """Say whether a page of this origin is ours, when it asks for this host."""
    if not validate_host(split_domain_port(host)[0], settings.ALLOWED_HOSTS):
        return False
    return origin == settings.PUBLIC_URL or urlsplit(origin).netloc == host
