"""The process that mounts a paused sandbox's file system where nothing of the host is.

    python -m hosts.paused_mount '<spec as JSON>'     started as root by `hosts.paused_files`

    root, host's namespaces      a small root is built: /usr read-only, /dev/fuse
      └─ fork, new user, mount, PID, network, IPC and UTS namespaces
         └─ init (PID 1)         e2fsck if need be, fuse2fs, then the server; it unmounts
            ├─ fuse2fs           sees the small root; may do no more than mount
            └─ server            the guest's file system is its root; has no capability

Whatever the guest wrote is parsed by e2fsck and fuse2fs and handed on by the server, all as
an unprivileged range of ids, with few system calls (`hosts.paused_syscalls`), without a
network, without a way to run or load a file of the guest (the mount is `noexec`, and
Python's imports are shut before the first request). Init is the namespace's PID 1: when it
ends, so does everything in it.

All is made ready before it is known what is to be served: that comes by a socket (`Given`),
so that `hosts.paused_starter` can keep a confinement that waits. The image comes last, as a
mount of its own: so the sandbox's disk can be attached meanwhile.

One line of JSON says how the start went.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from common.units import GiB
from hosts import paused_clean, paused_settle, paused_syscalls
from hosts.sftp_server import Journal, forbid_imports, serve

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CONFINED = (
    CLONE_NEWUSER
    | CLONE_NEWNS
    | CLONE_NEWPID
    | CLONE_NEWNET
    | CLONE_NEWIPC
    | CLONE_NEWUTS
    | CLONE_NEWCGROUP
)

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

AT_FDCWD = -100
OPEN_TREE_CLONE = 1
MOVE_MOUNT_F_EMPTY_PATH = 4
SYS_OPEN_TREE = 428
SYS_MOVE_MOUNT = 429
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}[os.uname().machine]
PR_SET_PDEATHSIG = 1
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
CAP_SYS_ADMIN = 21
CAPABILITY_VERSION_3 = 0x20080522

# Ids of guests from 0 up to this keep their values in the image; real ones are far below.
MAPPED_IDS = 1 << 30

# What e2fsck needs grows with the used part of a file system; a guest may not take more.
CHECK_MEMORY_BYTES = 2 * GiB
MOUNT_MEMORY_BYTES = 1 * GiB
SERVER_MEMORY_BYTES = 1 * GiB
SERVER_FILES = 1024

CHECK_TIMEOUT_S = 60.0
CHECK_CPU_S = 60
MOUNT_TIMEOUT_S = 20.0
SERVER_END_TIMEOUT_S = 10.0
# fuse2fs writes what it holds back when it is unmounted, through the storage daemon.
UNMOUNT_TIMEOUT_S = 60.0

MOUNTPOINT = "/mnt"
MOUNT_OPTIONS = "fakeroot,rw,noexec,nosuid,nodev"
"""What fuse2fs of libfuse 2 (Debian 12) and of libfuse 3 (Debian 13) takes."""

KILL_TIMEOUT_S = 10.0
MAX_FD = 1 << 20

_TOLD = 8
"""How many descriptors init is given: all but the pid file's."""

_MEND, _REPAIR = b"m", b"r"

AWAITED = {signal.SIGTERM, signal.SIGCHLD}

ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "TZ": "UTC0"}


class Given(NamedTuple):
    """The descriptors that a confinement serves with; nothing of it has a name inside.

    `state` has a lock on it that lasts until init ends, and `image` is a socket by which the
    image comes (see `send_image`). Who starts it reads how that went from `status`.
    """

    status: int
    image: int
    state: int
    listener: int
    settling: int
    used: int
    dirty: int
    log: int
    pid_file: int


@dataclass(frozen=True)
class Spec:
    """What `hosts.paused_files` asks for.

    `root_dir` is an absolute path. `repair` asks e2fsck to mend all it can, and not only what
    is sure to be harmless: for an image whose last mount here was cut short.
    """

    root_dir: str
    first_id: int
    repair: bool
    given: Given


class Failed(Exception):
    """The start failed; `code` is "damaged" or "unavailable"."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


@dataclass
class Outside:
    """What was opened outside the confinement and is used from inside it."""

    status: int
    image: int
    state: int
    listener: socket.socket
    settling: socket.socket
    used: int
    dirty: int
    repair: bool

    def tell(self, **answer: object) -> None:
        """Write the one line that the worker waits for, if it still lives."""
        with suppress(BrokenPipeError):
            os.write(self.status, json.dumps(answer).encode() + b"\n")
        os.close(self.status)

    def write_state(self, *, is_clean: bool) -> None:
        """Record whether the image is as a proper unmount leaves it."""
        os.pwrite(self.state, b"clean\n" if is_clean else b"dirty\n", 0)
        os.fsync(self.state)


def main(argument: str) -> None:
    """Make a confinement, and have it serve at once."""
    values = json.loads(argument)
    spec = Spec(**values | {"given": Given(*values["given"])})
    confine(spec.root_dir, spec.first_id).serve(spec.given, repair=spec.repair)


# The small root


def _enter_small_root(root: str) -> None:
    _unshare(CLONE_NEWNS)
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", MS_NOSUID, "mode=0755,size=1m")
    os.umask(0o022)
    for name in ("dev", "etc", "image", "mnt", "old", "usr"):
        os.mkdir(f"{root}/{name}")
    _bind_read_only("/usr", f"{root}/usr")
    for name in ("bin", "lib", "lib64", "sbin"):
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
        elif os.path.isdir(f"/{name}"):
            os.mkdir(f"{root}/{name}")
            _bind_read_only(f"/{name}", f"{root}/{name}")
    _touch(f"{root}/etc/ld.so.cache")
    _bind_read_only("/etc/ld.so.cache", f"{root}/etc/ld.so.cache")
    for name, minor in (("null", (1, 3)), ("fuse", (10, 229))):
        # Our own nodes: the machine's /dev/fuse may be root's alone.
        os.mknod(f"{root}/dev/{name}", 0o020666, os.makedev(*minor))
        os.chmod(f"{root}/dev/{name}", 0o666)  # noqa: S103
    _touch(f"{root}/image/disk")
    os.chdir(root)
    if _libc.syscall(SYS_PIVOT_ROOT, b".", b"old"):
        raise _os_error("pivot_root")
    os.chdir("/")
    if _libc.umount2(b"/old", MNT_DETACH):
        raise _os_error("umount2")
    os.rmdir("/old")
    _mount(None, "/", None, MS_REMOUNT | MS_NOSUID | MS_RDONLY, "mode=0755,size=1m")


def send_image(connection: socket.socket, path: str) -> None:
    """Give a confinement its image, as a mount that nothing else of the host is reached by."""
    flags = OPEN_TREE_CLONE | os.O_CLOEXEC
    tree = _libc.syscall(SYS_OPEN_TREE, AT_FDCWD, path.encode(), flags)
    if tree < 0:
        raise _os_error("open_tree")
    try:
        socket.send_fds(connection, [b"i"], [tree])
    finally:
        os.close(tree)


def _take_image(connection: int) -> bool:
    """Mount the image once it comes; False where nobody will send it any more."""
    with socket.socket(fileno=connection) as stream:
        _, trees, _, _ = socket.recv_fds(stream, 1, 1)
    if not trees:
        return False
    empty_path = MOVE_MOUNT_F_EMPTY_PATH
    if _libc.syscall(SYS_MOVE_MOUNT, trees[0], b"", AT_FDCWD, b"/image/disk", empty_path):
        raise _os_error("move_mount")
    os.close(trees[0])
    return True


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))


def _bind_read_only(source: str, target: str) -> None:
    _mount(source, target, None, MS_BIND)
    _mount(None, target, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    encoded = [None if part is None else part.encode() for part in (source, target, kind)]
    if _libc.mount(*encoded, ctypes.c_ulong(flags), options.encode() if options else None):
        raise _os_error(f"mount {target}")


def _unshare(flags: int) -> None:
    if _libc.unshare(flags):
        raise _os_error("unshare")


def _os_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


# The confinement


@dataclass
class Confinement:
    """An init that waits in a confinement of its own for what it is to serve.

    It ends when this process ends without having said.
    """

    init_pid: int
    """As the host knows it."""
    _orders: socket.socket
    _proc: int

    def waits_for(self, other: socket.socket) -> bool:
        """Wait until something comes by another socket; False when init ended before."""
        return self._orders not in select.select([self._orders, other], [], [])[0]

    def serve(self, given: Given, *, repair: bool) -> None:
        """Have it serve what is given, all of which is closed here, and say who it is."""
        told = given[:_TOLD]
        socket.send_fds(self._orders, [_REPAIR if repair else _MEND], told)
        # Init alone holds the lock by the time that anyone knows its pid.
        for fd in told:
            os.close(fd)
        started = _start_time(self._proc, self.init_pid)
        os.write(given.pid_file, f"{self.init_pid} {started}\n".encode())


def confine(root_dir: str, first_id: int) -> Confinement:
    """Build the small root, for this process too, and confine a child in it.

    Args:
        root_dir: a folder over which the root is built; nobody else sees it there.
        first_id: as `hosts.paused_files.PausedFilesConfig` has it.
    """
    os.umask(0o077)
    # Blocked from here on, for init to inherit: to a PID 1 that neither blocks nor handles
    # it, the kernel does not deliver a SIGTERM at all.
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    _enter_small_root(root_dir)
    orders, inits = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        _run_and_exit(lambda: _become_confined(inits, theirs))
    inits.close()
    theirs.close()
    if ours.recv(1) != b"u":
        raise RuntimeError("the confined child did not start")
    line = f"0 {first_id} {MAPPED_IDS}\n".encode()
    for name in ("uid_map", "gid_map"):
        fd = os.open(f"{child}/{name}", os.O_WRONLY, dir_fd=proc)
        os.write(fd, line)
        os.close(fd)
    ours.send(b"m")
    init_pid = int(ours.recv(32))
    ours.close()
    os.waitpid(child, 0)
    return Confinement(init_pid, orders, proc)


def _start_time(proc: int, pid: int) -> str:
    """Read when a process began: with its pid, that names it for good."""
    fd = os.open(f"{pid}/stat", os.O_RDONLY, dir_fd=proc)
    try:
        # The name in parentheses may hold anything; the 22nd field is counted after it.
        return os.read(fd, 4096).decode(errors="replace").rpartition(")")[2].split()[19]
    finally:
        os.close(fd)


def _become_confined(orders: socket.socket, starter: socket.socket) -> None:
    kept = sorted({0, 1, 2, orders.fileno(), starter.fileno()})
    for lower, upper in zip(kept, [*kept[1:], MAX_FD], strict=True):
        os.closerange(lower + 1, upper)
    _unshare(CONFINED)
    starter.send(b"u")
    if starter.recv(1) != b"m":
        raise RuntimeError("the ids were not mapped")
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    # The fork's child is the first process of the new PID namespace. We are still in the
    # old one, so what fork returns to us is the pid that the host knows it by.
    init = os.fork()
    if init == 0:
        starter.close()
        _run_and_exit(lambda: Init(orders).run())
    starter.send(str(init).encode())


def _run_and_exit(body: Any) -> NoReturn:
    """Run in a forked child and end it there, whatever happens."""
    status = 1
    try:
        status = body() or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _limit(
    *, memory_bytes: int, processes: int | None = None, cpu_s: int | None = None
) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if cpu_s is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    if processes is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapData(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def _drop_capabilities(*, keep: int | None = None) -> None:
    """Give up all capabilities but one, for this process and all that it starts."""
    if _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise _os_error("no_new_privs")
    for number in range(64):
        if number != keep:
            _libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)  # fails beyond the kernel's last
    kept = 0 if keep is None else 1 << keep
    data = (_CapData * 2)(_CapData(kept, kept, 0), _CapData(0, 0, 0))
    header = _CapHeader(CAPABILITY_VERSION_3, 0)
    if _libc.capset(ctypes.byref(header), data):
        raise _os_error("capset")


# Init


class _Child:
    """A process that init has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def code(self) -> int | None:
        """Return with what it ended; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def has_ended(self) -> bool:
        return self.code() is not None

    def ends_in(self, seconds: float) -> bool:
        """Wait for its end; tell whether it came in time."""
        deadline = time.monotonic() + seconds
        while not self.has_ended():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def signal(self, number: signal.Signals) -> None:
        if not self.has_ended():
            os.kill(self.pid, number)


class Init:
    """PID 1 of the confinement."""

    _outside: Outside
    _server: _Child
    _ready: int

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._image = -1
        self._fuse, self._open_gate = self._prepare_mount()

    def run(self) -> int:
        """Serve until SIGTERM; the state file then says whether all is in the image."""
        if not self._take_orders():
            return 0  # the kernel ends all of it with us
        self._server, self._ready = self._fork_server()
        if not _take_image(self._outside.image):
            self._kill_all()
            return 1
        self._image = os.open("/image/disk", os.O_RDWR | os.O_CLOEXEC)
        try:
            if self._outside.repair or not paused_clean.is_clean(self._image):
                self._check()
            self._mount()
            self._await_server()
        except Failed as failure:
            self._kill_all()
            self._outside.tell(ok=False, code=failure.code, detail=failure.detail)
            return 1
        self._outside.tell(ok=True)

        asked = self._wait()
        saved = self._save()
        if saved:
            self._outside.write_state(is_clean=True)
        self._kill_all()
        return 0 if asked and saved else 1

    def _take_orders(self) -> bool:
        """Wait until it is said what to serve; False where nobody will any more."""
        with self._orders:
            order, fds, _, _ = socket.recv_fds(self._orders, len(_REPAIR), _TOLD)
        if not fds:
            return False
        status, image, state, listener, settling, used, dirty, log = fds
        os.dup2(log, 2)
        os.close(log)
        self._outside = Outside(
            status=status,
            image=image,
            state=state,
            listener=socket.socket(fileno=listener),
            settling=socket.socket(fileno=settling),
            used=used,
            dirty=dirty,
            repair=order == _REPAIR,
        )
        return True

    def _check(self) -> None:
        """Replay the journal and mend what is harmless to mend.

        fuse2fs 1.47.0 crashes on a journal that needs replay: this comes first.
        """
        mode = ("-f", "-y") if self._outside.repair else ("-p",)
        check, gate = _fork_waiting(
            ["e2fsck", *mode, "/image/disk"],
            calls=paused_syscalls.CHECK,
            memory_bytes=CHECK_MEMORY_BYTES,
            cpu_s=CHECK_CPU_S,
        )
        os.write(gate, b"g")
        if not check.ends_in(CHECK_TIMEOUT_S):
            check.signal(signal.SIGKILL)
            raise Failed("damaged", f"no end of checking in {CHECK_TIMEOUT_S:.0f} s")
        code = check.code()
        # 1 mended, 2 mended and wants a reboot; all else is left wrong, or never ran.
        if code is None or code & ~3:
            raise Failed("damaged", f"e2fsck ended with {code}")

    def _prepare_mount(self) -> tuple[_Child, int]:
        return _fork_waiting(
            # Single-threaded: one lock would serialise its threads anyway.
            ["fuse2fs", "/image/disk", MOUNTPOINT, "-f", "-s", "-o", MOUNT_OPTIONS],
            calls=paused_syscalls.MOUNT,
            memory_bytes=MOUNT_MEMORY_BYTES,
            keep=CAP_SYS_ADMIN,
        )

    def _mount(self) -> None:
        if self._fuse.has_ended():
            raise Failed("unavailable", "what was to mount it has ended")
        self._outside.write_state(is_clean=False)
        os.write(self._open_gate, b"g")

    def _fork_server(self) -> tuple[_Child, int]:
        """Fork the server, which waits for the mount; what is returned tells when it is in."""
        ready, tell_ready = os.pipe()
        server = os.fork()
        if server == 0:
            for fd in (ready, self._outside.status, self._outside.state, self._outside.image):
                os.close(fd)
            os.close(self._open_gate)
            _run_and_exit(lambda: _serve_inside(self._outside, tell_ready))
        os.close(tell_ready)
        return _Child(server), ready

    def _await_server(self) -> None:
        deadline = time.monotonic() + MOUNT_TIMEOUT_S
        while not select.select([self._ready], [], [], 0.05)[0]:
            if self._fuse.has_ended() or time.monotonic() > deadline:
                break
        else:
            is_ready = os.read(self._ready, 1) == b"r"
            os.close(self._ready)
            if is_ready:
                return
        # fuse2fs ends at once on a file system that it cannot open.
        code = "damaged" if self._fuse.has_ended() else "unavailable"
        raise Failed(code, "the file system could not be mounted")

    def _wait(self) -> bool:
        """Wait for SIGTERM (True) or the end of the server or the mount (False)."""
        while True:
            if signal.sigwait(AWAITED) == signal.SIGTERM:
                return True
            if self._fuse.has_ended() or self._server.has_ended():
                return False

    def _save(self) -> bool:
        """End what serves, and tell whether all of it has reached the image."""
        if not paused_settle.answers(self._image):
            return False  # there is nothing any more that could be written to
        saved = self._end_server() and self._unmount()
        try:
            os.fsync(self._image)
        except OSError:
            return False
        return saved

    def _end_server(self) -> bool:
        """End the server; between two requests, or it is killed in the middle of one."""
        self._server.signal(signal.SIGTERM)
        if self._server.ends_in(SERVER_END_TIMEOUT_S):
            return True
        self._server.signal(signal.SIGKILL)
        return False

    def _unmount(self) -> bool:
        """Unmount, and wait until fuse2fs has written all that it held."""
        if self._fuse.has_ended() or _libc.umount2(MOUNTPOINT.encode(), 0):
            return False
        return self._fuse.ends_in(UNMOUNT_TIMEOUT_S) and self._fuse.code() == 0

    def _kill_all(self) -> None:
        """Kill what is left; the kernel would, when PID 1 ends, but this is in order."""
        for child in (self._fuse, self._server):
            child.signal(signal.SIGKILL)
        self._fuse.ends_in(KILL_TIMEOUT_S)


def _fork_waiting(
    command: list[str],
    *,
    calls: paused_syscalls.Filter,
    memory_bytes: int,
    cpu_s: int | None = None,
    keep: int | None = None,
) -> tuple[_Child, int]:
    """Fork what becomes a program, confined, as soon as a byte is written to what is returned.

    Its output is dropped: a hostile file system decides how much of it there is.
    """
    gate, open_gate = os.pipe()

    def become() -> None:
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        os.closerange(3, gate)
        os.closerange(gate + 1, MAX_FD)
        _limit(memory_bytes=memory_bytes, cpu_s=cpu_s)
        _drop_capabilities(keep=keep)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        calls.load()
        if os.read(gate, 1):
            os.execvpe(command[0], command, ENVIRONMENT)  # noqa: S606 -- no shell is wanted

    pid = os.fork()
    if pid == 0:
        _run_and_exit(become)
    os.close(gate)
    return _Child(pid), open_gate


def _serve_inside(outside: Outside, ready: int) -> None:
    """Go into the mount, give up everything, and serve."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # All that can be done before there is a mount is done by then.
    _limit(memory_bytes=SERVER_MEMORY_BYTES, processes=0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SERVER_FILES, SERVER_FILES))
    journal = Journal(outside.used, outside.dirty)
    forbid_imports()
    with asyncio.Runner() as runner:
        runner.get_loop()  # makes the sockets that it needs
        image = _enter_mount()
        _drop_capabilities()
        signal.pthread_sigmask(signal.SIG_SETMASK, set())

        async def serve_when_ready() -> None:
            paused_syscalls.SERVE.load()
            os.write(ready, b"r")
            os.close(ready)
            await serve(outside.listener, journal, outside.settling, image)

        runner.run(serve_when_ready())


def _enter_mount() -> int:
    """Wait for the mount to appear, then make it the root of this process.

    A mount that does not answer blocks here; init ends the wait with a kill.

    Returns: the image that is mounted.
    """
    outer = os.stat("/").st_dev
    while os.stat(MOUNTPOINT).st_dev == outer:
        time.sleep(0.001)
    image = os.open("/image/disk", os.O_RDWR | os.O_CLOEXEC)
    os.chroot(MOUNTPOINT)
    os.chdir("/")
    return image


if __name__ == "__main__":
    main(sys.argv[1])
