"""The nbdkit plugin that serves generations, read-only.

    nbdkit --readonly python export_plugin.py config=<file>
    nbdkit --readonly python export_plugin.py spare=<file>

The file is JSON, readable by the export's user only: the key of the store must not be on a
command line. It is `hosts.volumes.exports.ExportConfig`. `PYTHONPATH` leads to our packages
and the virtual environment's. A spare process reads its file, which is not there before, when
somebody first connects.

Source: nbdkit-python-plugin(3).
"""

import logging
import threading
import time
from pathlib import Path
from typing import Any

import nbdkit

from common.units import KiB
from hosts.volumes.blocks import BLOCK_BYTES
from hosts.volumes.exports import ExportConfig, Exports
from hosts.volumes.reader import VolumeReader

API_VERSION = 2

MAX_REQUEST_BYTES = 512 * KiB
"""Each of nbdkit's threads keeps a buffer for the largest request that it has seen, and there
are many. QEMU splits what is larger, and asks for the parts at once."""

FORGOTTEN_AFTER_S = 5.0
"""How often a spare looks whether its folder is still there."""

_state: dict[str, Any] = {"spare": False}
_lock = threading.Lock()


def thread_model() -> int:
    """Let many requests wait for the store at once."""
    return int(nbdkit.THREAD_MODEL_PARALLEL)


def config(key: str, value: str) -> None:
    """Take a `key=value` of the command line."""
    if key not in ("config", "spare"):
        raise RuntimeError(f"unknown parameter {key}")
    _state["path"] = Path(value)
    _state["spare"] = key == "spare"


def config_complete() -> None:
    """Read the configuration, so that a bad one ends nbdkit at once."""
    if not _state["spare"]:
        _read_config()


def after_fork() -> None:
    """Have a spare look after itself."""
    if _state["spare"]:
        threading.Thread(target=_end_if_forgotten, name="forgotten", daemon=True).start()


def _end_if_forgotten() -> None:
    """End a spare that nobody has taken and whose folder is gone: nobody can any more."""
    folder = _state["path"].parent
    while "exports" not in _state:
        if not folder.exists():
            nbdkit.shutdown()
            return
        time.sleep(FORGOTTEN_AFTER_S)


def _read_config() -> None:
    settings = ExportConfig.read(_state["path"])
    logging.basicConfig(
        filename=settings.log, level=logging.WARNING, format=settings.LOG_FORMAT
    )
    _state["exports"] = Exports(settings)


def open(readonly: bool) -> VolumeReader:  # noqa: A001 - nbdkit's name
    """Begin a connection to the generation that the client names."""
    with _lock:
        if "exports" not in _state:
            _read_config()
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
    return (1, BLOCK_BYTES, MAX_REQUEST_BYTES)


def pread(reader: VolumeReader, buffer: bytearray, offset: int, flags: int) -> None:
    """Read; an exception becomes an I/O error of the request."""
    try:
        exports: Exports = _state["exports"]
        exports.read_into(reader, buffer, offset)
    except Exception:
        logging.getLogger(__name__).exception("a read of %d bytes failed", len(buffer))
        raise
