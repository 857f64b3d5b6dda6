"""Blocks, the unit of storage: 64 KiB of a device, kept compressed and sealed in a pack."""

import threading
from hashlib import sha256

import zstandard

from common.units import KiB
from hosts.volumes.errors import Corrupt
from hosts.volumes.keys import SEAL_BYTES, Sealer
from hosts.volumes.naming import DIGEST_BYTES, content_digest

BLOCK_BYTES = 64 * KiB
"""Also the cluster size of the overlays, so that a cluster is exactly a block."""

MAX_STORED_BYTES = BLOCK_BYTES + SEAL_BYTES
"""The most that a block takes in a pack."""

ZERO_BLOCK = bytes(BLOCK_BYTES)

Block = bytes | bytearray
"""The content of one, or how it is stored."""

LEVEL = 1
"""zstd level: the fastest of the ordinary ones, since a pause waits for it."""


class _Contexts(threading.local):
    compressor: zstandard.ZstdCompressor | None = None
    decompressor: zstandard.ZstdDecompressor | None = None


_local = _Contexts()


def _compressor() -> zstandard.ZstdCompressor:
    # A context may be used by one thread at a time.
    if _local.compressor is None:
        _local.compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)
    return _local.compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if _local.decompressor is None:
        _local.decompressor = zstandard.ZstdDecompressor()
    return _local.decompressor


def compress(data: Block) -> bytes:
    """Compress as one zstd frame that states its size."""
    compressed: bytes = _compressor().compress(data)
    return compressed


def decompress(frame: bytes, limit_bytes: int) -> bytes:
    """Decompress one frame, trusting nothing in it.

    Raises:
        Corrupt: it is no zstd frame, or would be longer than the limit. Memory for more
            than the limit is never asked for, whatever the frame claims.
    """
    try:
        size_bytes = zstandard.frame_content_size(frame)
        if not 0 <= size_bytes <= limit_bytes:
            raise Corrupt(f"A frame claims {size_bytes} bytes, above {limit_bytes}.")
        data: bytes = _decompressor().decompress(frame, max_output_size=limit_bytes)
    except zstandard.ZstdError as error:
        raise Corrupt(f"Not a good zstd frame: {error}") from error
    if len(data) != size_bytes:
        raise Corrupt(f"A frame of {size_bytes} bytes gave {len(data)}.")
    return data


def block_digest(block: Block, *, is_sealed: bool) -> bytes:
    """Hash a block for the index of a generation.

    With SHA-256 where it will be sealed: processors do that nearly three times as fast. What
    is plain stays as the release before wrote it, and as its exports can read it.
    """
    return sha256(block).digest()[:DIGEST_BYTES] if is_sealed else content_digest(block)


def encode_block(block: Block, sealer: Sealer | None) -> bytes:
    """Encode a block for a pack: compressed, or as it is when that is not smaller, sealed.

    So a content of `BLOCK_BYTES` says "not compressed".
    """
    frame = compress(block)
    content = frame if len(frame) < BLOCK_BYTES else block
    return bytes(content) if sealer is None else sealer.seal("packs", content)


def decode_block(stored: bytes, digest: bytes, sealer: Sealer | None) -> bytes:
    """Give back the block, checked against its content hash.

    Raises:
        Corrupt: these bytes are not that block.
    """
    content = stored if sealer is None else sealer.open("packs", stored)
    block = content if len(content) == BLOCK_BYTES else decompress(content, BLOCK_BYTES)
    if len(block) != BLOCK_BYTES or not _is_block(block, digest, sealer):
        raise Corrupt("A block is not what its hash says.")
    return block


def _is_block(block: bytes, digest: bytes, sealer: Sealer | None) -> bool:
    if block_digest(block, is_sealed=sealer is not None) == digest:
        return True
    # The first that were sealed were hashed as if they were not.
    return sealer is not None and block_digest(block, is_sealed=False) == digest
