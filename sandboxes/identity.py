"""Who a guest is: its SSH host key, drawn from a secret rather than stored.

The same sandbox gets the same key at each start, so that people's `known_hosts` stay
right; nothing that could impersonate it lies in the database.
"""

from uuid import UUID

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)


def host_key(guest_uuid: UUID, *, secret: str) -> tuple[str, str]:
    """Return a guest's private key (OpenSSH PEM) and its public half (one line).

    Source: RFC 5869 (HKDF).
    """
    derive = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"sandkeep guest host key")
    seed = derive.derive(secret.encode() + guest_uuid.bytes)
    key = Ed25519PrivateKey.from_private_bytes(seed)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return private.decode(), public.decode()
