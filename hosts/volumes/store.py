"""The object store on any S3, through boto3; an export reads through `s3_reader`."""

import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from hosts.volumes.errors import ObjectMissing, StoreUnavailable
from hosts.volumes.objects import Listed, ObjectReader, ObjectStore, StoreConfig, StoreCounts

__all__ = [
    "Listed",
    "ObjectReader",
    "ObjectStore",
    "S3ObjectStore",
    "StoreConfig",
    "StoreCounts",
]

CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 20
"""For an answer to one request, and each wait for bytes."""

ATTEMPTS = 5
"""With standard back-off: rides out the seconds after a restart in which SeaweedFS answers
500, and a rolling restart of others. Longer outages are the caller's to retry."""

CONNECTIONS = 16
DELETE_BATCH = 1000
"""The most that S3 takes in one DeleteObjects."""

_session = boto3.session.Session()
_session_lock = threading.Lock()
"""One session: it keeps the description of S3 that every client would parse anew.
Clients are safe for many threads, but making them is not."""

_THERE_ALREADY = {"PreconditionFailed", "412"}
_MISSING = {"NoSuchKey", "404", "NotFound"}


class S3ObjectStore:
    """Thread-safe; one per process is enough."""

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self.counts = StoreCounts()
        self._lock = threading.Lock()
        with _session_lock:
            self._client = _session.client(
                "s3",
                endpoint_url=config.endpoint_url,
                region_name=config.region,
                aws_access_key_id=config.access_key_id,
                aws_secret_access_key=config.secret_access_key,
                config=Config(
                    signature_version="s3v4",
                    s3={"addressing_style": "path"},
                    connect_timeout=CONNECT_TIMEOUT_S,
                    read_timeout=READ_TIMEOUT_S,
                    retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
                    max_pool_connections=CONNECTIONS,
                    # The newer default sends trailers, which several S3 servers store as data.
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                ),
            )

        # Whoever lets go of a store lets go of its connections.
        weakref.finalize(self, self._client.close)

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, amount in more.items():
                setattr(self.counts, name, getattr(self.counts, name) + amount)

    def _key(self, key: str) -> str:
        return self.config.prefix + key

    def put_new(self, key: str, body: bytes) -> bool:
        self._count(puts=1, uploaded_bytes=len(body))
        try:
            self._client.put_object(
                Bucket=self.config.bucket, Key=self._key(key), Body=body, IfNoneMatch="*"
            )
        except ClientError as error:
            if _code(error) in _THERE_ALREADY:
                return False
            raise _translated(error, key) from error
        except (BotoCoreError, HTTPClientError, OSError) as error:
            raise _translated(error, key) from error
        return True

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        wanted: dict[str, Any] = {}
        if length is not None:
            wanted["Range"] = f"bytes={start}-{start + length - 1}"
        elif start:
            wanted["Range"] = f"bytes={start}-"
        try:
            answer = self._client.get_object(
                Bucket=self.config.bucket, Key=self._key(key), **wanted
            )
            body = answer["Body"].read()
        except (ClientError, BotoCoreError, HTTPClientError, OSError) as error:
            raise _translated(error, key) from error
        self._count(gets=1, downloaded_bytes=len(body))
        if length is not None and len(body) != length:
            raise StoreUnavailable(f"{key} gave {len(body)} bytes of {length}.")
        return body

    def delete(self, keys: Iterable[str]) -> None:
        todo = [self._key(key) for key in keys]
        for at in range(0, len(todo), DELETE_BATCH):
            batch = todo[at : at + DELETE_BATCH]
            self._count(deletes=1)
            try:
                answer = self._client.delete_objects(
                    Bucket=self.config.bucket,
                    Delete={"Objects": [{"Key": key} for key in batch], "Quiet": True},
                )
            except (ClientError, BotoCoreError, HTTPClientError, OSError) as error:
                raise _translated(error, batch[0]) from error
            if answer.get("Errors"):
                raise StoreUnavailable(f"{len(answer['Errors'])} objects were not deleted.")

    def keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        for item in self.listing(prefix):
            yield item.key, item.size_bytes

    def listing(self, prefix: str) -> Iterator[Listed]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self.config.bucket, Prefix=self._key(prefix)
        )
        cut = len(self.config.prefix)
        try:
            for page in pages:
                self._count(lists=1)
                for item in page.get("Contents", ()):
                    yield Listed(item["Key"][cut:], item["Size"], item["LastModified"])
        except (ClientError, BotoCoreError, HTTPClientError, OSError) as error:
            raise _translated(error, prefix) from error


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _translated(error: Exception, key: str) -> ObjectMissing | StoreUnavailable:
    if isinstance(error, ClientError):
        code = _code(error)
        if code in _MISSING:
            return ObjectMissing(key)
        return StoreUnavailable(f"Object storage answered {code or 'an error'} for {key}.")
    # Only the class: texts of the client may hold the URL, and with it a signature.
    return StoreUnavailable(f"Object storage gave no answer for {key}: {type(error).__name__}.")
