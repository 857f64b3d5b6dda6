"""What objects are encrypted with: a key for each volume, and AES-256-GCM under it.

    sealed = nonce (12) + ciphertext + tag (16)

Each block of a pack, each leaf and each root is sealed by itself, so that a range of an
object can be read alone. The nonce is synthetic: a keyed hash of what is sealed. So sealing
the same again gives the same bytes, an upload that is tried again finds its objects, and a
nonce never comes twice with two texts. The key is the volume's alone, derived from its
owner's, and the tag binds the kind of object: a block is never taken for a leaf, nor one
volume's for another's.

Imported by the nbdkit plugin, so it keeps away from Django.

Source: NIST SP 800-38D (GCM), RFC 5869 (HKDF), RFC 8452 (why synthetic nonces are safe).
"""

from collections.abc import Collection, Iterable, Mapping
from hmac import digest as hmac
from typing import Protocol
from uuid import UUID

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from hosts.volumes.errors import Corrupt, KeyMissing
from hosts.volumes.naming import Kind

KEY_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16
SEAL_BYTES = NONCE_BYTES + TAG_BYTES
"""How much longer than its content a sealed thing is."""


class KeySource(Protocol):
    """Knows the keys of volumes."""

    def keys_of(self, volumes: Collection[UUID]) -> Mapping[UUID, bytes | None]:
        """Give the key of each volume; None for one whose objects are plain.

        Raises:
            KeyDestroyed: what one of them holds can never be read again.
            KeyMissing: one of them is not known.
        """
        ...


class PlainKeys:
    """A `KeySource` whose volumes are all plain."""

    def keys_of(self, volumes: Collection[UUID]) -> Mapping[UUID, bytes | None]:
        return dict.fromkeys(volumes)


class GivenKeys:
    """A `KeySource` that was told the keys, such as an export's."""

    def __init__(self, keys: Mapping[UUID, bytes | None]) -> None:
        self._keys = dict(keys)

    def keys_of(self, volumes: Collection[UUID]) -> Mapping[UUID, bytes | None]:
        missing = [volume for volume in volumes if volume not in self._keys]
        if missing:
            raise KeyMissing(missing[0])
        return {volume: self._keys[volume] for volume in volumes}


def derive(key: bytes, purpose: bytes) -> bytes:
    """Derive a key for one purpose from another (HKDF-Expand with SHA-256, one block)."""
    return hmac(key, purpose + b"\x01", "sha256")


class Sealer:
    """Seals and opens what belongs to one volume. Thread-safe."""

    __slots__ = ("_cipher", "_nonce_key", "_volume")

    def __init__(self, key: bytes, volume: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError("A volume's key has 32 bytes.")
        self._volume = volume
        self._cipher = AESGCM(derive(key, b"sandkeep seal " + volume))
        self._nonce_key = derive(key, b"sandkeep nonce " + volume)

    def seal(self, kind: Kind, data: bytes | bytearray) -> bytes:
        """Encrypt; equal data gives equal bytes."""
        bound = kind.encode() + self._volume
        nonce = hmac(self._nonce_key, bound + data, "sha256")[:NONCE_BYTES]
        return nonce + self._cipher.encrypt(nonce, data, bound)

    def open(self, kind: Kind, sealed: bytes) -> bytes:
        """Decrypt what `seal` gave.

        Raises:
            Corrupt: it is not that, or of another kind or volume.
        """
        if len(sealed) < SEAL_BYTES:
            raise Corrupt("A sealed object is cut short.")
        try:
            return self._cipher.decrypt(
                sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], kind.encode() + self._volume
            )
        except InvalidTag as error:
            raise Corrupt("A sealed object was not written with its volume's key.") from error


class Keyring:
    """The keys that one piece of work needs, asked for once. Thread-safe.

    Not to be kept for longer than the work takes: a destroyed key must be gone.
    """

    def __init__(self, source: KeySource) -> None:
        self._source = source
        self._keys: dict[bytes, bytes | None] = {}
        self._sealers: dict[bytes, Sealer | None] = {}

    def learn(self, volumes: Iterable[bytes]) -> None:
        """Ask for the keys of volumes that are not known yet, all at once."""
        unknown = {UUID(bytes=volume) for volume in volumes if volume not in self._sealers}
        if not unknown:
            return
        for volume, key in self._source.keys_of(unknown).items():
            self._keys[volume.bytes] = key
            self._sealers[volume.bytes] = None if key is None else Sealer(key, volume.bytes)

    def sealer(self, volume: bytes) -> Sealer | None:
        """Give what seals a volume's objects; None when they are plain.

        Raises:
            KeyDestroyed, KeyMissing: of the source.
        """
        if volume not in self._sealers:
            self.learn([volume])
        return self._sealers[volume]

    def seal(self, kind: Kind, volume: bytes, data: bytes) -> bytes:
        """Make an object of a volume, or part of one, ready to be stored."""
        sealer = self.sealer(volume)
        return data if sealer is None else sealer.seal(kind, data)

    def open(self, kind: Kind, volume: bytes, stored: bytes) -> bytes:
        """Give back what `seal` was given.

        Raises:
            Corrupt: it is not what that volume's key sealed.
        """
        sealer = self.sealer(volume)
        return stored if sealer is None else sealer.open(kind, stored)

    def in_hex(self) -> dict[str, str | None]:
        """Write the keys that were learned for a process that reads with them."""
        return {
            volume.hex(): None if key is None else key.hex()
            for volume, key in self._keys.items()
        }


def keys_from_hex(values: Mapping[str, str | None]) -> GivenKeys:
    """Read what `Keyring.in_hex` wrote."""
    return GivenKeys(
        {
            UUID(hex=volume): None if key is None else bytes.fromhex(key)
            for volume, key in values.items()
        }
    )
