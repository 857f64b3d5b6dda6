"""A reader of S3 objects in the standard library alone.

An export serves one disk in a process of its own, and there is one for every running
sandbox: each would hold a boto3 in memory and import it during a resume. All it needs is
a signed GET.

Source: AWS Signature Version 4, "Authenticating Requests (AWS Signature Version 4)" in the
Amazon S3 API reference.
"""

import http.client
import ssl
import weakref
from datetime import UTC, datetime
from hashlib import sha256
from hmac import new as hmac
from queue import Empty, Full, LifoQueue
from urllib.parse import quote, urlsplit

from hosts.volumes.errors import ObjectMissing, StoreUnavailable
from hosts.volumes.objects import StoreConfig

TIMEOUT_S = 30
"""For connecting, and for each wait for bytes; callers retry for far longer."""

_NO_BODY = sha256(b"").hexdigest()
_SIGNED = "host;x-amz-content-sha256;x-amz-date"


class S3Reader:
    """Reads objects; thread-safe, keeps idle connections."""

    def __init__(self, config: StoreConfig, *, timeout_s: float = TIMEOUT_S) -> None:
        self._config = config
        self._timeout_s = timeout_s
        url = urlsplit(config.endpoint_url)
        self._secure = url.scheme == "https"
        self._host = url.netloc
        self._base = quote(f"{url.path.rstrip('/')}/{config.bucket}/{config.prefix}", safe="/~")
        self._tls = ssl.create_default_context() if self._secure else None
        self._idle: LifoQueue[http.client.HTTPConnection] = LifoQueue(maxsize=16)
        weakref.finalize(self, _close_all, self._idle)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        path = self._base + quote(key, safe="/~")
        headers = self._signed(path)
        if length is not None:
            headers["Range"] = f"bytes={start}-{start + length - 1}"
        elif start:
            headers["Range"] = f"bytes={start}-"
        try:
            status, body = self._ask(path, headers)
        except (OSError, http.client.HTTPException) as error:
            raise StoreUnavailable(f"No answer for {key}: {type(error).__name__}.") from error
        if status == http.HTTPStatus.NOT_FOUND:
            raise ObjectMissing(key)
        wanted_status = http.HTTPStatus.PARTIAL_CONTENT if "Range" in headers else 200
        if status != wanted_status:
            raise StoreUnavailable(f"Object storage answered {status} for {key}.")
        if length is not None and len(body) != length:
            raise StoreUnavailable(f"{key} gave {len(body)} bytes of {length}.")
        return body

    def _ask(self, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        connection, fresh = self._connection()
        try:
            try:
                return self._exchange(connection, path, headers)
            except (OSError, http.client.HTTPException):
                if fresh:
                    raise
            # An idle connection may have been closed by the server: once more on a new one.
            connection.close()
            connection = self._connect()
            return self._exchange(connection, path, headers)
        except BaseException:
            connection.close()
            raise

    def _exchange(
        self, connection: http.client.HTTPConnection, path: str, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        try:
            if not answer.will_close:
                self._idle.put_nowait(connection)
        except Full:
            connection.close()
        return answer.status, body

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        try:
            return self._idle.get_nowait(), False
        except Empty:
            return self._connect(), True

    def _connect(self) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self._host, timeout=self._timeout_s)
        return http.client.HTTPSConnection(
            self._host, timeout=self._timeout_s, context=self._tls
        )

    def _signed(self, path: str) -> dict[str, str]:
        """Sign everything but the range, which S3 does not ask to be signed."""
        at = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        scope = f"{at[:8]}/{self._config.region}/s3/aws4_request"
        request = (
            f"GET\n{path}\n\nhost:{self._host}\nx-amz-content-sha256:{_NO_BODY}\n"
            f"x-amz-date:{at}\n\n{_SIGNED}\n{_NO_BODY}"
        )
        hashed = sha256(request.encode()).hexdigest()
        text = f"AWS4-HMAC-SHA256\n{at}\n{scope}\n{hashed}"
        key = b"AWS4" + self._config.secret_access_key.encode()
        for part in scope.split("/"):
            key = hmac(key, part.encode(), "sha256").digest()
        signature = hmac(key, text.encode(), "sha256").hexdigest()
        return {
            "Host": self._host,
            "x-amz-content-sha256": _NO_BODY,
            "x-amz-date": at,
            "Authorization": (
                f"AWS4-HMAC-SHA256 Credential={self._config.access_key_id}/{scope},"
                f"SignedHeaders={_SIGNED},Signature={signature}"
            ),
        }


def _close_all(idle: LifoQueue[http.client.HTTPConnection]) -> None:
    while not idle.empty():
        idle.get_nowait().close()
