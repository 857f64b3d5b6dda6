"""What the agent does for the host: freeze, thaw, stop, clock, figures; growth is apart."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import struct
import time

from hosts.guest import protocol, spawn
from hosts.guest.contexts import Rejected
from hosts.guest.growth import Growth

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    from hosts.guest import growth
    from hosts.guest.contexts import Contexts
    from hosts.guest.doors import MachineOps, Reply
    from hosts.guest.loop import Loop, Timer

    class Disk(growth.Disk, Protocol):
        """The root file system."""

        def freeze(self) -> None: ...
        def thaw(self) -> None: ...

    class Server(Protocol):
        """The SSH server of the platform."""

        def is_ready(self) -> bool: ...
        def pause(self) -> None: ...
        def resume(self) -> None: ...


MAX_FREEZE_S = 600.0

_FIFREEZE = 0xC0045877
_FITHAW = 0xC0045878
_LOOK_EVERY_S = 0.05
# _IOW('f', 16, __u64) of the kernel's fs/ext4/ext4.h, which resize2fs uses, too.
_EXT4_IOC_RESIZE_FS = 0x40086610
_SUPERBLOCK_AT = 1024


class Processes:
    """All that runs in the guest but process 1 and the agent."""

    def others(self) -> list[int]:
        return other_processes()

    def signal(self, number: int) -> None:
        """Signal them all in one call, which new children of theirs cannot escape."""
        try:
            os.kill(-1, number)
        except ProcessLookupError:
            return  # there are none


class RootDisk:
    """The mounted root file system on its device."""

    def __init__(self, path: str = "/", device: str = "/dev/vda") -> None:
        self._path = path
        self._device = device
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def freeze(self) -> None:
        """Write everything out and hold all writers; fine when it is frozen already."""
        os.sync()
        try:
            fcntl.ioctl(self._fd, _FIFREEZE, 0)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise

    def thaw(self) -> None:
        """Let writers go on; fine when it is not frozen."""
        try:
            fcntl.ioctl(self._fd, _FITHAW, 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise

    def span_bytes(self) -> int:
        """How much of the device it takes, what it keeps for itself included.

        Source: the kernel's Documentation/filesystems/ext4/super.rst; what is read is what
        the mounted file system works on.
        """
        fd = os.open(self._device, os.O_RDONLY | os.O_CLOEXEC)
        try:
            block = os.pread(fd, 1024, _SUPERBLOCK_AT)
        finally:
            os.close(fd)
        low, scale, high = (
            int.from_bytes(block[at : at + 4], "little") for at in (0x4, 0x18, 0x150)
        )
        return (high << 32 | low) << 10 + scale

    def grow(self, size_bytes: int) -> None:
        """Enlarge it while it is in use; returns when that is done."""
        unit_bytes = os.statvfs(self._path).f_frsize
        fcntl.ioctl(self._fd, _EXT4_IOC_RESIZE_FS, struct.pack("Q", size_bytes // unit_bytes))

    def free_bytes(self) -> int:
        found = os.statvfs(self._path)
        return found.f_bavail * found.f_frsize

    def device_bytes(self) -> int:
        fd = os.open(self._device, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.lseek(fd, 0, os.SEEK_END)
        finally:
            os.close(fd)


class Machine:
    """The operations of the host; each answers by calling `reply` once."""

    def __init__(
        self,
        loop: Loop,
        disk: Disk,
        server: Server,
        contexts: Contexts,
        processes: Processes,
        *,
        limit_bytes: int = 0,
    ) -> None:
        self._loop = loop
        self._processes = processes
        self._disk = disk
        self._server = server
        self._contexts = contexts
        self._thaw_timer: Timer | None = None
        self._disk.thaw()  # an agent before this one may have died with the disk frozen
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._growth = Growth(loop, disk, memory_bytes=memory_bytes, limit_bytes=limit_bytes)

    def ops(self) -> MachineOps:
        """What may be asked at either door."""
        return {
            "ping": self._ping,
            "stats": self._stats,
            "set_clock": self._set_clock,
            "sync": self._sync,
            "freeze": self._freeze,
            "thaw": self._thaw,
            "prepare_stop": self._prepare_stop,
            "grow": self._growth.grow,
        }

    def _ping(self, _params: dict[str, Any], reply: Reply) -> None:
        reply(
            {
                "ok": True,
                "ready": self._server.is_ready(),
                "boot_id": boot_id(),
                "uptime_s": time.clock_gettime(time.CLOCK_BOOTTIME),
            }
        )

    def _stats(self, _params: dict[str, Any], reply: Reply) -> None:
        reply({"ok": True, **figures(), "frozen": self._growth.held, **self._disk_figures()})

    def _disk_figures(self) -> dict[str, Any]:
        found = os.statvfs("/")
        return {
            "disk_bytes": found.f_blocks * found.f_frsize,
            "disk_free_bytes": found.f_bavail * found.f_frsize,
            "disk_files": found.f_files,
            "disk_files_free": found.f_ffree,
            "device_bytes": self._disk.device_bytes(),
            "span_bytes": self._disk.span_bytes(),
            "ceiling_bytes": self._growth.ceiling_bytes(),
        }

    def _set_clock(self, params: dict[str, Any], reply: Reply) -> None:
        unix_s = _number(params, "unix_s", 1e9, 1e11)
        step_s = unix_s - time.time()
        time.clock_settime(time.CLOCK_REALTIME, unix_s)
        reply({"ok": True, "step_s": step_s})

    def _sync(self, _params: dict[str, Any], reply: Reply) -> None:
        self._in_child(os.sync, lambda _: reply({"ok": True}))

    def _freeze(self, params: dict[str, Any], reply: Reply) -> None:
        deadline_s = _number(params, "deadline_s", 0.1, MAX_FREEZE_S)
        if self._thaw_timer:
            self._thaw_timer.cancel()
        # Set before the disk is frozen: whatever happens on the way, it is thawed again.
        self._thaw_timer = self._loop.later(deadline_s, self._thaw_now)
        self._freeze_then(reply)

    def _thaw(self, _params: dict[str, Any], reply: Reply) -> None:
        self._thaw_now()
        self._contexts.closed = False
        self._server.resume()
        reply({"ok": True})

    def _thaw_now(self) -> None:
        if self._thaw_timer:
            self._thaw_timer.cancel()
            self._thaw_timer = None
        self._growth.held = False
        self._disk.thaw()

    def _freeze_then(self, reply: Reply, *, for_good: bool = False) -> None:
        def frozen(status: int) -> None:
            if status != 0:
                self._thaw_now()
                reply(_failure("the file system could not be frozen"))
            elif not for_good and self._thaw_timer is None:
                self._thaw_now()  # the deadline came first
                reply(_failure("freezing took longer than the deadline"))
            else:
                self._growth.held = True
                reply({"ok": True})

        self._in_child(self._disk.freeze, frozen)

    def _prepare_stop(self, params: dict[str, Any], reply: Reply) -> None:
        """End every process but this one and its parent, and leave the disk clean.

        It stays frozen: what comes next is the end of the machine, or an explicit thaw. Asked
        again, it does the same again. What cannot be killed, as it waits for a device, is
        left behind at the deadline: it can write no more once the disk is frozen. An agent
        that is itself stopped or stuck does not answer, which the host bounds.
        """
        deadline_s = _number(params, "deadline_s", 0.1, MAX_FREEZE_S)
        started_s = time.monotonic()
        self._contexts.closed = True
        self._server.pause()
        self._thaw_now()  # what is to end may be waiting to write
        self._processes.signal(signal.SIGTERM)
        self._processes.signal(signal.SIGCONT)
        kill_at_s = started_s + min(5.0, deadline_s / 2)
        give_up_at_s = started_s + deadline_s

        def look() -> None:
            now_s = time.monotonic()
            if not self._processes.others() or now_s >= give_up_at_s:
                self._freeze_then(reply, for_good=True)
                return
            if now_s >= kill_at_s:
                self._processes.signal(signal.SIGKILL)
            self._loop.later(_LOOK_EVERY_S, look)

        look()

    def _in_child(self, act: Callable[[], None], ended: Callable[[int], None]) -> None:
        """Do what may block in a child, so that the doors stay open meanwhile."""
        self._loop.await_child(spawn.fork_call(act), ended)


def boot_id() -> str:
    """The kernel's name for this run of it."""
    return _read("/proc/sys/kernel/random/boot_id").strip()


def figures() -> dict[str, Any]:
    """Memory, processor and processes, as the kernel counts them."""
    memory = {}
    for line in _read("/proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        memory[name] = int(value.split()[0]) * 1024
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    cpu = [int(part) for part in _read("/proc/stat").split("\n", 1)[0].split()[1:]]
    load = _read("/proc/loadavg").split()
    return {
        "memory_bytes": memory["MemTotal"],
        "memory_available_bytes": memory["MemAvailable"],
        "cpu_busy_s": (sum(cpu[:8]) - cpu[3] - cpu[4]) / ticks_per_s,
        "cpu_idle_s": (cpu[3] + cpu[4]) / ticks_per_s,
        "load": float(load[0]),
        "processes": int(load[3].partition("/")[2]),
        "unix_s": time.time(),
    }


def other_processes() -> list[int]:
    """All that run but the kernel's own, process 1, and the caller with its children's dead."""
    spared = {1, os.getpid()}
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib is slow to import
        if not name.isdecimal() or int(name) in spared:
            continue
        try:
            fields = _read(f"/proc/{name}/stat").rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        is_kernel_thread = int(fields[6]) & 0x00200000  # PF_KTHREAD
        if not is_kernel_thread and fields[0] not in ("Z", "X"):
            found.append(int(name))
    return found


def _failure(message: str) -> dict[str, Any]:
    return {"ok": False, "error": {"code": "failed", "message": message}}


def _number(params: dict[str, Any], name: str, least: float, most: float) -> float:
    value = params.get(name)
    if type(value) not in (int, float) or not least <= value <= most:  # type: ignore[operator]
        raise Rejected(
            protocol.INVALID_REQUEST, f"{name} must be a number from {least:g} to {most:g}"
        )
    return float(value)  # type: ignore[arg-type]


def _read(path: str) -> str:
    with open(path) as file:  # noqa: PTH123 - pathlib is slow to import
        return file.read()
