"""Overlays without QEMU: a qcow2 file with the clusters that a test wants."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hosts.volumes.blocks import BLOCK_BYTES
from hosts.volumes.commit import Commit, prepare_overlays
from hosts.volumes.qcow2 import L2_SPAN_BLOCKS

_HEADER = struct.Struct(">4sIQIIQIIQQIIQQQQII")


def write_overlay(path: Path, size_bytes: int, blocks: Mapping[int, bytes | None]) -> Path:
    """Write an overlay that maps these blocks; None is one that reads as zeros."""
    tables = sorted({number // L2_SPAN_BLOCKS for number in blocks})
    l1_entries = -(-size_bytes // (L2_SPAN_BLOCKS * BLOCK_BYTES))
    l1_bytes = -(-8 * l1_entries // BLOCK_BYTES) * BLOCK_BYTES
    l2_at = {table: BLOCK_BYTES + l1_bytes + BLOCK_BYTES * n for n, table in enumerate(tables)}
    at = BLOCK_BYTES + l1_bytes + BLOCK_BYTES * len(tables)
    l1 = [l2_at.get(table, 0) for table in range(l1_entries)]
    l2 = {table: [0] * L2_SPAN_BLOCKS for table in tables}
    data = []
    for number, block in sorted(blocks.items()):
        table, slot = divmod(number, L2_SPAN_BLOCKS)
        if block is None:
            l2[table][slot] = 1
            continue
        l2[table][slot] = at
        data.append(block)
        at += BLOCK_BYTES
    header = _HEADER.pack(
        b"QFI\xfb", 3, 0, 0, 16, size_bytes, 0, l1_entries, BLOCK_BYTES,
        0, 0, 0, 0, 0, 0, 0, 4, _HEADER.size,
    )  # fmt: skip
    with path.open("wb") as file:
        file.write(header.ljust(BLOCK_BYTES, b"\0"))
        file.write(struct.pack(f">{l1_entries}Q", *l1).ljust(l1_bytes, b"\0"))
        for table in tables:
            file.write(struct.pack(f">{L2_SPAN_BLOCKS}Q", *l2[table]))
        for block in data:
            file.write(block)
    return path


def commit_overlays(overlays: Sequence[Path], **how: Any) -> Commit | None:
    """Prepare a commit as `prepare_overlays` has it, and put it."""
    with prepare_overlays(overlays, **how) as prepared:
        return None if prepared is None else prepared.put()
