"""Starting what sends a generation as a file, on this host: one process for each download.

    web ──SSH──▶ gate ──UNIX──▶ <run dir>/images/<id>.sock ── hosts.volumes.image_stream

It runs as the daemons' user, outside the worker, and knows the keys of one disk alone.
"""

import os
import pwd
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from common.errors import Unavailable
from hosts.volumes.daemons import plain_environment
from hosts.volumes.image_stream import StreamConfig
from hosts.volumes.objects import StoreConfig

ROOT = Path(__file__).resolve().parent.parent

# Each takes up to 30 MiB and a share of the host's way to the store.
MAX_EXPORTS = 8


class TooManyExports(Unavailable):
    """This host sends as many files as it may."""

    code = "too_many_exports"

    def __str__(self) -> str:
        return f"This host sends {MAX_EXPORTS} images already. Try again in a while."


@dataclass(frozen=True)
class ExportsConfig:
    """Where the sockets are, where the store is, and who the processes run as."""

    images_dir: Path
    store: StoreConfig
    user: str | None = None


class ImageExports:
    """The downloads of this worker."""

    def __init__(self, config: ExportsConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._running: dict[UUID, subprocess.Popen[str]] = {}

    def start(self, export_id: UUID, *, root_key: str, keys: Mapping[str, str | None]) -> None:
        """Have the generation sent to whoever connects to the export's socket; idempotent.

        Raises:
            TooManyExports: this host sends as many as it may.
        """
        with self._lock:
            running = {k: p for k, p in self._running.items() if p.poll() is None}
            self._running = running
            if export_id in running:
                return
            if len(running) >= MAX_EXPORTS:
                raise TooManyExports
            running[export_id] = process = self._spawn(export_id)
        config = StreamConfig(self._config.store, root_key, dict(keys))
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(config.text())
        # Nobody else waits for it; without this it stays a zombie.
        threading.Thread(target=process.wait, daemon=True).start()

    def _spawn(self, export_id: UUID) -> subprocess.Popen[str]:
        folder = self._config.images_dir
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        account = None
        if self._config.user is not None and os.geteuid() == 0:
            account = pwd.getpwnam(self._config.user)
            os.chown(folder, account.pw_uid, account.pw_gid)
        path = folder / f"{export_id.hex}.sock"
        path.unlink(missing_ok=True)
        places = [str(ROOT), str(ROOT / "platform"), *filter(None, sys.path)]
        return subprocess.Popen(
            [sys.executable, "-m", "hosts.volumes.image_stream", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd="/",
            start_new_session=True,
            user=account.pw_uid if account else None,
            group=account.pw_gid if account else None,
            extra_groups=[] if account else None,
            env=plain_environment()
            | {"PYTHONPATH": os.pathsep.join(places), "PYTHONDONTWRITEBYTECODE": "1"},
        )
