"""What the engine asks of an object store, without any store's client."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple, Protocol


class ObjectReader(Protocol):
    """The side of a store that an export needs."""

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Read an object, or exactly `length` bytes of it from `start`.

        Raises:
            ObjectMissing: there is no such object.
            StoreUnavailable: no good answer, which includes a short one.
        """
        ...


class ObjectStore(ObjectReader, Protocol):
    """Immutable objects by key. Keys are content-named, so nothing is ever overwritten."""

    def put_new(self, key: str, body: bytes) -> bool:
        """Store an object unless it is there already.

        Returns: whether this call stored it; False means that it was there.

        Raises:
            StoreUnavailable: the outcome is unknown; call again.
        """
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that are not there are no error."""
        ...

    def keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        """List (key, size in bytes), in order of key."""
        ...

    def listing(self, prefix: str) -> Iterator["Listed"]:
        """List objects with all that the store knows of them, in order of key."""
        ...


class Listed(NamedTuple):
    """An object as the store lists it."""

    key: str
    size_bytes: int
    modified_at: datetime


@dataclass(frozen=True)
class StoreConfig:
    """Where the store is and how to speak to it."""

    endpoint_url: str
    bucket: str
    access_key_id: str
    secret_access_key: str = field(repr=False)
    region: str = "us-east-1"
    prefix: str = ""
    """Put before every key, as it is: end it with a slash."""


@dataclass
class StoreCounts:
    """What a client has asked of its store since it was made."""

    puts: int = 0
    gets: int = 0
    deletes: int = 0
    lists: int = 0
    uploaded_bytes: int = 0
    downloaded_bytes: int = 0
