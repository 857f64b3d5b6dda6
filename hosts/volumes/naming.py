"""How objects in the store are named: by volume, epoch and content.

    packs/<volume hex>/<epoch: 8 hex>/<content hash>      compressed blocks
    leaves/<volume hex>/<epoch: 8 hex>/<content hash>     all leaves that one commit changed
    roots/<volume hex>/<epoch: 8 hex>/<content hash>      a generation

A name is the hash of what it names, so an upload that is tried again finds its object
instead of repeating it, and whatever is read can be checked. The epoch keeps a host that
was thought dead from ever writing where its successor does.
"""

import re
import struct
from hashlib import blake2b, sha256
from typing import Literal, NamedTuple, Self
from uuid import UUID

from hosts.volumes.errors import Corrupt

DIGEST_BYTES = 16
_NAME = struct.Struct(f"<16sI{DIGEST_BYTES}s")
NAME_BYTES = _NAME.size
"""Length of `ObjectName.pack()`."""

Kind = Literal["packs", "leaves", "roots"]

_KEY = re.compile(r"(packs|leaves|roots)/([0-9a-f]{32})/([0-9a-f]{8})/([0-9a-f]{32})")


def content_digest(body: bytes | bytearray | memoryview) -> bytes:
    """Hash content: the name of an object, and the identity of a block."""
    return blake2b(body, digest_size=DIGEST_BYTES).digest()


def object_digest(kind: Kind, body: bytes | bytearray) -> bytes:
    """Hash a whole object for its name.

    A pack not as `content_digest` does: processors hash SHA-256 nearly three times as fast,
    and almost all that is uploaded is packs. Readers never ask, they check block by block.
    """
    return sha256(body).digest()[:DIGEST_BYTES] if kind == "packs" else content_digest(body)


def is_object(kind: str, digest: bytes, body: bytes) -> bool:
    """Tell whether an object is what its name says; the release before hashed packs so too."""
    if content_digest(body) == digest:
        return True
    return kind == "packs" and object_digest("packs", body) == digest


class ObjectName(NamedTuple):
    """An object's name without its kind, as small as the index needs it.

    A tuple, since a root of 100 GiB has 12,000 and more of them: they are made, hashed and
    sorted many times faster than objects of a class of ours.
    """

    volume: bytes
    epoch: int
    digest: bytes

    @classmethod
    def of(cls, kind: Kind, volume_id: UUID, epoch: int, body: bytes | bytearray) -> Self:
        return cls(volume_id.bytes, epoch, object_digest(kind, body))

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        return cls(*_NAME.unpack(raw))

    def pack(self) -> bytes:
        return _NAME.pack(self.volume, self.epoch, self.digest)

    def key(self, kind: Kind) -> str:
        return f"{kind}/{self.volume.hex()}/{self.epoch:08x}/{self.digest.hex()}"


def parse_key(key: str) -> tuple[str, ObjectName]:
    """Take a key apart into its kind and name.

    Raises:
        Corrupt: it is no key of ours.
    """
    match = _KEY.fullmatch(key)
    if match is None:
        raise Corrupt(f"{key!r} is not the key of an object.")
    kind, volume, epoch, digest = match.groups()
    return kind, ObjectName(bytes.fromhex(volume), int(epoch, 16), bytes.fromhex(digest))
