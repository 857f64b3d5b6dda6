"""How uvicorn reads requests here: `uvicorn --http common.server:HttpProtocol`."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class HttpProtocol(HttpToolsProtocol):
    """Takes a WebSocket upgrade whose `Connection` header comes in several parts.

    The sandbox0 SDK sends `Connection: Upgrade` and `connection: keep-alive`. Uvicorn (0.54)
    looks at the last one only, finds no upgrade, and answers the request as a plain one.

    Source: RFC 9110, section 5.3: several fields of one name are one list.
    """

    def _get_upgrade(self) -> bytes | None:
        tokens: set[bytes] = set()
        upgrade = None
        for name, value in self.headers:
            if name == b"connection":
                tokens |= {token.lower().strip() for token in value.split(b",")}
            elif name == b"upgrade":
                upgrade = value.lower()
        return upgrade if b"upgrade" in tokens else None
