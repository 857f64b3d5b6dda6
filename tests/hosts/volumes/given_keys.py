"""A source of keys without a database: each volume has one, made from its id."""

from collections.abc import Collection, Mapping
from hashlib import blake2b
from uuid import UUID


class KeyForEach:
    """Obeys `KeySource`."""

    def keys_of(self, volumes: Collection[UUID]) -> Mapping[UUID, bytes | None]:
        return {
            volume: blake2b(volume.bytes, digest_size=32, key=b"tests").digest()
            for volume in volumes
        }
