"""The nbdkit plugin that serves generations, read-only.

    nbdkit --readonly python export_plugin.py config=<file>

The file is JSON, readable by the export's user only: the key of the store must not be on a
command line. It is `hosts.volumes.exports.ExportConfig`. `PYTHONPATH` leads to our packages
and the virtual environment's.

Source: nbdkit-python-plugin(3).
"""

import logging
from pathlib import Path
from typing import Any

import nbdkit

from common.units import MiB
from hosts.volumes.blocks import BLOCK_BYTES
from hosts.volumes.exports import ExportConfig, Exports
from hosts.volumes.reader import VolumeReader

API_VERSION = 2

_state: dict[str, Any] = {}


def thread_model() -> int:
    """Let many requests wait for the store at once."""
    return int(nbdkit.THREAD_MODEL_PARALLEL)


def config(key: str, value: str) -> None:
    """Take a `key=value` of the command line."""
    if key != "config":
        raise RuntimeError(f"unknown parameter {key}")
    _state["path"] = Path(value)


def config_complete() -> None:
    """Read the configuration, so that a bad one ends nbdkit at once."""
    settings = ExportConfig.read(_state["path"])
    logging.basicConfig(
        filename=settings.log, level=logging.WARNING, format=settings.LOG_FORMAT
    )
    _state["exports"] = Exports(settings)


def open(readonly: bool) -> VolumeReader:  # noqa: A001 - nbdkit's name
    """Begin a connection to the generation that the client names."""
    exports: Exports = _state["exports"]
    return exports.open(nbdkit.export_name())


def get_size(reader: VolumeReader) -> int:
    """Say how large the device is, in bytes."""
    return reader.size_bytes


def can_multi_conn(reader: VolumeReader) -> bool:
    """Nothing ever changes, so connections cannot disagree."""
    return True


def block_size(reader: VolumeReader) -> tuple[int, int, int]:
    """Say the smallest, the best and the largest request."""
    return (1, BLOCK_BYTES, 32 * MiB)


def pread(reader: VolumeReader, buffer: bytearray, offset: int, flags: int) -> None:
    """Read; an exception becomes an I/O error of the request."""
    try:
        exports: Exports = _state["exports"]
        exports.read_into(reader, buffer, offset)
    except Exception:
        logging.getLogger(__name__).exception("a read of %d bytes failed", len(buffer))
        raise
