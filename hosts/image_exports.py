"""Starting what sends disks as files, and takes images in: a process for each.

    web ──SSH──▶ gate ──UNIX──▶ <run dir>/images/<id>.sock ─┬─ hosts.volumes.image_stream
                                                            └─ hosts.volumes.image_intake

They run as the daemons' user, outside the worker. What sends knows the keys of one disk
alone; what takes in knows none.
"""

import fcntl
import os
import pwd
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from common.errors import Unavailable
from hosts.volumes.daemons import plain_environment
from hosts.volumes.image_intake import IntakeConfig
from hosts.volumes.image_stream import StreamConfig
from hosts.volumes.objects import StoreConfig

ROOT = Path(__file__).resolve().parent.parent

# Each takes up to 30 MiB and a share of the host's way to the store.
MAX_EXPORTS = 8
LEFT_OVER_S = 300
"""A file that was not written to for so long, and that no process holds, is left over."""


class TooManyExports(Unavailable):
    """This host sends or takes in as many files as it may."""

    code = "too_many_exports"

    def __str__(self) -> str:
        return f"This host moves {MAX_EXPORTS} images already. Try again in a while."


@dataclass(frozen=True)
class ExportsConfig:
    """Where the sockets are, where the store is, and who the processes run as."""

    images_dir: Path
    intake_dir: Path
    """Where images lie between their arrival and their import."""
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
            TooManyExports: this host has as many of these processes as it may.
        """
        config = StreamConfig(self._config.store, root_key, dict(keys))
        self._start(export_id, "hosts.volumes.image_stream", config.text())

    def take_in(self, image_id: UUID, limits: IntakeConfig) -> None:
        """Take an image in from whoever connects to its socket; idempotent.

        Raises:
            TooManyExports: this host has as many of these processes as it may.
        """
        self._own(self._config.intake_dir)
        module = "hosts.volumes.image_intake"
        self._start(image_id, module, limits.text(), str(self._config.intake_dir))

    def taken(self, image_id: UUID) -> Path:
        """Return where the raw image is that was taken in, if it was."""
        return self._config.intake_dir / f"{image_id.hex}.raw"

    def left_over(self) -> list[tuple[UUID, Path]]:
        """List the files of images that no process takes in any more.

        An image that was taken in and waits for its import is among them.
        """
        folder = self._config.intake_dir
        now = time.time()
        found = []
        for path in sorted(folder.iterdir()) if folder.exists() else ():
            with suppress(FileNotFoundError, ValueError):
                is_old = path.lstat().st_mtime < now - LEFT_OVER_S
                if is_old and not _is_held(path.with_suffix(".part")):
                    found.append((UUID(hex=path.stem), path))
        return found

    def _start(self, identity: UUID, module: str, config: str, *arguments: str) -> None:
        with self._lock:
            running = {k: p for k, p in self._running.items() if p.poll() is None}
            self._running = running
            if identity in running:
                return
            if len(running) >= MAX_EXPORTS:
                raise TooManyExports
            running[identity] = process = self._spawn(identity, module, arguments)
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(config)
        # Nobody else waits for it; without this it stays a zombie.
        threading.Thread(target=process.wait, daemon=True).start()

    def _account(self) -> pwd.struct_passwd | None:
        if self._config.user is None or os.geteuid() != 0:
            return None
        return pwd.getpwnam(self._config.user)

    def _own(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        account = self._account()
        if account is not None:
            os.chown(folder, account.pw_uid, account.pw_gid)

    def _spawn(
        self, identity: UUID, module: str, arguments: Sequence[str]
    ) -> subprocess.Popen[str]:
        self._own(self._config.images_dir)
        account = self._account()
        path = self._config.images_dir / f"{identity.hex}.sock"
        path.unlink(missing_ok=True)
        places = [str(ROOT), str(ROOT / "platform"), *filter(None, sys.path)]
        return subprocess.Popen(
            [sys.executable, "-m", module, str(path), *arguments],
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


def _is_held(path: Path) -> bool:
    """Tell whether a process takes in what goes to this file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # it is not there, or no file
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
