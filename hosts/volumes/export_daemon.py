"""One disk's nbdkit: serves committed generations, each under its root's key as its name.

So a disk that moves on to a new generation needs no new process: the root is put beside
the others, and the storage daemon opens it by name.

    RUN_DIR/disks/<volume hex>/export.{json,sock,pid,log,spare}, fetched, roots-<…>

The process is the host's spare where there is one, see `spares`.
"""

import os
import pwd
import stat
from collections.abc import Callable
from pathlib import Path

import zstandard

from hosts.volumes.cache import ObjectCache
from hosts.volumes.daemons import (
    daemon_pid,
    end_daemon,
    plain_environment,
    spare_mark,
    start_daemon,
)
from hosts.volumes.errors import Corrupt
from hosts.volumes.exports import ExportConfig, root_file
from hosts.volumes.keys import Keyring
from hosts.volumes.objects import StoreConfig
from hosts.volumes.start import MAX_BYTES, decode_start, encode_start

PID_NAME = "export.pid"
SOCKET_NAME = "export.sock"
CONFIG_NAME = "export.json"

THREADS = 16
"""As many as QEMU's NBD client has requests under way."""


class ExportDaemon:
    """The export of one disk."""

    def __init__(
        self,
        run_dir: Path,
        cache_dir: Path,
        *,
        cache_budget_bytes: int,
        start_s: float,
        user: str | None,
        take_spare: Callable[[Path], bool],
    ) -> None:
        self._run_dir = run_dir
        self._cache_dir = cache_dir
        self._cache_budget_bytes = cache_budget_bytes
        self._start_s = start_s
        self._user = user
        self._take_spare = take_spare
        self._pidfile = run_dir / PID_NAME
        self.socket = run_dir / SOCKET_NAME
        self.fetched = run_dir / "fetched"
        self._start = run_dir / "start"
        self._ahead = run_dir / "ahead"

    def is_running(self) -> bool:
        return daemon_pid(self._pidfile) is not None

    def offer(self, root_key: str, cache: ObjectCache) -> None:
        """Make a generation available to the next that connects."""
        path = root_file(self._run_dir, root_key)
        if not path.exists():
            self._write(path, cache.whole(root_key))

    def withdraw_others(self, root_key: str) -> None:
        """Forget generations that no storage daemon will open again."""
        kept = root_file(self._run_dir, root_key)
        for path in self._run_dir.glob("roots-*"):
            if path != kept:
                path.unlink(missing_ok=True)

    def begin_start(self, start_blocks: bytes | None) -> None:
        """Have the next process record what is read first, and fetch this ahead."""
        self._start.unlink(missing_ok=True)
        self._ahead.unlink(missing_ok=True)
        if start_blocks is not None:
            self._write(self._ahead, start_blocks)

    def start_blocks(self) -> bytes | None:
        """Give what was read first; None while that is not known.

        The file is the daemons': it is checked, and written anew from what it says.
        """
        try:
            fd = os.open(
                self._start, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
            with os.fdopen(fd, "rb") as file:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    return None
                numbers = decode_start(file.read(MAX_BYTES + 1))
        except (OSError, Corrupt):
            return None
        return encode_start(numbers) if numbers else None

    def ensure(self, store: StoreConfig, keyring: Callable[[], Keyring]) -> None:
        """Start it unless it runs.

        Args:
            keyring: gives the keys of every volume that its generations will name. A
                commit names none that its base did not, but for the disk's own.
        """
        if self.is_running():
            return
        if not self.fetched.exists():
            self._write(self.fetched, b"")
        log = self._run_dir / "export.log"
        self._write(log, b"")
        config = self._run_dir / CONFIG_NAME
        settings = ExportConfig(
            roots=str(self._run_dir),
            cache=str(self._cache_dir),
            cache_budget_bytes=self._cache_budget_bytes,
            fetched=str(self.fetched),
            start=str(self._start),
            ahead=str(self._ahead),
            start_s=self._start_s,
            log=str(log),
            store=store,
            keys=keyring().in_hex(),
        )
        self._write(config, settings.text().encode())
        if not self._take_spare(self._run_dir):
            self.socket.unlink(missing_ok=True)
            spare_mark(self._pidfile).unlink(missing_ok=True)
            start_export(self._pidfile, self.socket, f"config={config}", user=self._user)

    def stop(self) -> None:
        """End it at once: it holds nothing, and may be waiting for the store for long."""
        end_daemon(self._pidfile, grace_s=0)

    def _write(self, path: Path, body: bytes) -> None:
        """Write a file that only the daemons' user may read, following no link of theirs."""
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(body)
            if self._user is not None and os.geteuid() == 0:
                entry = pwd.getpwnam(self._user)
                os.fchown(fd, entry.pw_uid, entry.pw_gid)


def start_export(pidfile: Path, socket: Path, parameter: str, *, user: str | None) -> None:
    """Start nbdkit with what its plugin is told.

    Raises:
        DaemonFailed: it did not start.
    """
    command = ["nbdkit", "--readonly", "-P", str(pidfile), "-U", str(socket)]
    command += ["-t", str(THREADS), "python", str(_PLUGIN), parameter]
    start_daemon(command, pidfile=pidfile, user=user, environment=_python_environment())


_PLUGIN = Path(__file__).resolve().with_name("export_plugin.py")


def _python_environment() -> dict[str, str]:
    """Lead nbdkit's own Python to our packages and the virtual environment's."""
    checkout = _PLUGIN.parents[2]
    site_packages = Path(zstandard.__file__).resolve().parents[1]
    places = (checkout, checkout / "platform", site_packages)
    return plain_environment() | {
        "PYTHONPATH": os.pathsep.join(map(str, places)),
        "PYTHONDONTWRITEBYTECODE": "1",
        # With an arena for each of its threads, glibc keeps 100 MB of freed buffers.
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_TRIM_THRESHOLD_": "1048576",
    }
