"""Owners' data keys, and the master key that wraps them.

    master key  ──wraps──  data key of an owner  ──derives──  key of each of its volumes

The master key never leaves its keeper: a file, the environment, or a service that has the
shape of `MasterKey` (a KMS). A data key is made by the first host that needs it, so the web
processes can make volumes without any key. Destroying it is deleting its wrapped form: what
it encrypted cannot be read from then on, in backups of the object store neither.
"""

import base64
import binascii
import os
import secrets
from collections.abc import Collection, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Protocol
from uuid import UUID

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db.models import F
from django.db.models.functions import Coalesce
from django.utils import timezone
from django.utils.module_loading import import_string

from hosts.models import DataKey, Volume
from hosts.volumes.errors import KeyDestroyed, KeyMissing
from hosts.volumes.keys import KEY_BYTES, NONCE_BYTES, derive

REWRAP_BATCH = 200
UNWRAPPED_KEPT = 1000
"""Data keys that a process remembers, so that a KMS is not asked for every commit."""


class MasterKey(Protocol):
    """What wraps data keys. `context` names the owner: another's does not unwrap."""

    key_id: str
    """Names the key; at most 64 characters, not secret."""

    def wrap(self, key: bytes, *, context: str) -> bytes: ...

    def unwrap(self, wrapped: bytes, *, context: str) -> bytes:
        """Give the key back.

        Raises:
            MasterKeyUnfit: it was wrapped by another key, or for another owner.
        """
        ...


class MasterKeyUnfit(ImproperlyConfigured):
    """No master key that this process has opens a data key."""


class LocalMasterKey:
    """A master key whose 32 bytes are in this process."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ImproperlyConfigured("A master key has 32 bytes, written in base64.")
        self._cipher = AESGCM(derive(key, b"sandkeep master key"))
        self.key_id = sha256(b"sandkeep master key id" + key).hexdigest()[:16]

    @classmethod
    def from_text(cls, text: str) -> "LocalMasterKey":
        """Read a key in base64."""
        try:
            return cls(base64.b64decode(text.strip(), validate=True))
        except binascii.Error as error:
            raise ImproperlyConfigured("A master key is not good base64.") from error

    def wrap(self, key: bytes, *, context: str) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, key, context.encode())

    def unwrap(self, wrapped: bytes, *, context: str) -> bytes:
        nonce, text = wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:]
        try:
            return self._cipher.decrypt(nonce, text, context.encode())
        except (InvalidTag, ValueError) as error:
            raise MasterKeyUnfit("A data key was wrapped by another key.") from error


@cache
def master_keys() -> tuple[MasterKey, ...]:
    """Return this process's master keys: the one that wraps, then those before it.

    Raises:
        ImproperlyConfigured: none is set, or one cannot be read.
    """
    return (_current_master_key(), *map(_from_file, settings.MASTER_KEY_FILE_PREVIOUS))


def _current_master_key() -> MasterKey:
    if settings.MASTER_KEY_CLASS:
        made: MasterKey = import_string(settings.MASTER_KEY_CLASS)()
        return made
    if settings.MASTER_KEY:
        return LocalMasterKey.from_text(settings.MASTER_KEY)
    if settings.MASTER_KEY_FILE:
        return _from_file(settings.MASTER_KEY_FILE)
    raise ImproperlyConfigured("Set MASTER_KEY_FILE, MASTER_KEY or MASTER_KEY_CLASS.")


def _from_file(path: str) -> MasterKey:
    try:
        return LocalMasterKey.from_text(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ImproperlyConfigured(f"The master key in {path} cannot be read.") from error


class DatabaseKeys:
    """The engine's `KeySource`: what the database says, with this process's master keys."""

    def keys_of(self, volumes: Collection[UUID]) -> Mapping[UUID, bytes | None]:
        found = Volume.objects.select_related("key").in_bulk(list(volumes))
        for volume_id in volumes:
            if volume_id not in found:
                raise KeyMissing(volume_id)
        return {
            volume_id: None if volume.key is None else volume_key(volume.key, volume_id)
            for volume_id, volume in found.items()
        }


def volume_key(data_key: DataKey, volume_id: UUID) -> bytes:
    """Return the key of one volume of the owner.

    Raises:
        KeyDestroyed: there is none any more.
    """
    return derive(_plain(data_key), b"sandkeep volume " + volume_id.bytes)


def data_key_of(owner: str) -> DataKey:
    """Return the row of an owner's key; the key itself is made by the host that needs it.

    Raises:
        KeyDestroyed: the owner is gone.
    """
    row, _ = DataKey.objects.get_or_create(owner=owner)
    if row.destroyed_at is not None:
        raise KeyDestroyed(owner)
    return row


_unwrapped: dict[bytes, bytes] = {}


def _plain(row: DataKey) -> bytes:
    if row.destroyed_at is not None:
        if row.wrapped is not None:
            _unwrapped.pop(bytes(row.wrapped), None)
        raise KeyDestroyed(row.owner)
    if row.wrapped is None:
        row = _made(row)
        return _plain(row)
    wrapped = bytes(row.wrapped)
    if wrapped not in _unwrapped:
        while len(_unwrapped) >= UNWRAPPED_KEPT:
            _unwrapped.pop(next(iter(_unwrapped)), None)
        _unwrapped[wrapped] = _unwrap(row)
    return _unwrapped[wrapped]


def _made(row: DataKey) -> DataKey:
    """Make the key unless somebody else does at the same time; theirs is used then."""
    master = master_keys()[0]
    DataKey.objects.filter(pk=row.pk, wrapped=None, destroyed_at=None).update(
        wrapped=master.wrap(secrets.token_bytes(KEY_BYTES), context=row.owner),
        master_key_id=master.key_id,
    )
    return DataKey.objects.get(pk=row.pk)


def _unwrap(row: DataKey) -> bytes:
    assert row.wrapped is not None
    for master in master_keys():
        if master.key_id == row.master_key_id:
            return master.unwrap(bytes(row.wrapped), context=row.owner)
    raise MasterKeyUnfit(f"The master key {row.master_key_id} is not among those given.")


def rotate() -> int:
    """Wrap every data key anew with the current master key. Packs are not touched.

    Safe to repeat and to run beside working hosts: a row that somebody else changed
    meanwhile is looked at again.

    Returns: how many were wrapped anew.
    """
    master = master_keys()[0]
    done = 0
    while True:
        old = DataKey.objects.filter(wrapped__isnull=False).exclude(master_key_id=master.key_id)
        rows = list(old.order_by("pk")[:REWRAP_BATCH])
        if not rows:
            return done
        for row in rows:
            wrapped = master.wrap(_unwrap(row), context=row.owner)
            done += DataKey.objects.filter(pk=row.pk, wrapped=row.wrapped).update(
                wrapped=wrapped, master_key_id=master.key_id
            )


def destroy(owner: str) -> None:
    """Destroy an owner's key: nothing that it stored can ever be read again.

    Safe to repeat. An owner that never stored anything can store nothing from then on.

    Raises:
        ValueError: the platform's key is every template's.
    """
    if not owner:
        raise ValueError("The platform's key is never destroyed.")
    row, _ = DataKey.objects.get_or_create(owner=owner)
    DataKey.objects.filter(pk=row.pk).update(
        wrapped=None, destroyed_at=Coalesce(F("destroyed_at"), timezone.now())
    )
    if row.wrapped is not None:
        _unwrapped.pop(bytes(row.wrapped), None)
