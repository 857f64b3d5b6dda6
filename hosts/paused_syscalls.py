"""The system calls that what reads a paused sandbox's file system may make: seccomp filters.

Whatever is not listed fails with EPERM, as if the kernel did not let this user; what the
guest's bytes might talk e2fsck, fuse2fs or the server into is then bounded to files,
memory and waiting. There is no way to a new socket, a namespace, another process's memory, a
key ring, a BPF program or io_uring.

The filters are built once, by libseccomp, and loaded by each process for itself. They are
kept by what it starts, and cannot be taken off.

Source: seccomp_rule_add(3); libseccomp is what QEMU is confined with, so hosts have it.
"""

from __future__ import annotations

import ctypes
import errno
import os

_ACT_ALLOW = 0x7FFF0000
_ACT_ERRNO = 0x00050000
_ATTRIBUTE_OPTIMIZE = 8
_BINARY_TREE = 2
_MASKED_EQUAL = 7

# A thread (fuse2fs reads bitmaps with some), and neither a process nor a namespace.
_CLONE_THREAD = 0x00010000
_CLONE_NEW = 0x7E020080
_PR_GET_DUMPABLE = 3
_ALL_BITS = (1 << 64) - 1

# What any program needs to load, to use memory and files, to wait, and to end.
COMMON = """
    access arch_prctl brk clock_getres clock_gettime clock_nanosleep close close_range
    dup dup2 dup3 exit exit_group faccessat faccessat2 fadvise64 fallocate fcntl fdatasync
    flock fstat fstatfs fsync ftruncate futex getcwd getdents getdents64 getegid geteuid getgid
    getgroups getpgrp getpid getppid getpriority getrandom getresgid getresuid getrlimit
    getrusage gettid gettimeofday getuid lseek lstat madvise membarrier mmap mprotect mremap
    munmap nanosleep newfstatat open openat pipe pipe2 poll ppoll pread64 preadv prlimit64
    pselect6 pwrite64 pwritev read readahead readlink readlinkat readv restart_syscall rseq
    rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigtimedwait
    sched_getaffinity sched_yield select set_robust_list set_tid_address setrlimit sigaltstack
    stat statfs statx sysinfo time times umask uname write writev
"""

# e2fsck and fuse2fs: to be executed, to ask for the size of the image, to mount.
CHECKER = "execve ioctl sync_file_range sync syncfs"
MOUNTER = "execve ioctl mount umount2 sync_file_range sync syncfs"

# The server: sockets that it is given, an event loop, and all that is done to files.
SERVER = """
    accept accept4 alarm epoll_create1 epoll_ctl epoll_pwait epoll_wait eventfd2 getsockname
    getsockopt ioctl recvfrom recvmsg sendmsg sendto setitimer setsockopt shutdown
    chmod chown fchmod fchmodat fchown fchownat fgetxattr lchown lgetxattr getxattr link linkat
    mkdir mkdirat rename renameat renameat2 rmdir symlink symlinkat truncate unlink unlinkat
    utime utimensat utimes futimesat getpid tgkill
"""


class _Compare(ctypes.Structure):
    """A condition on an argument: `value & mask == wanted`."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operation", ctypes.c_int),
        ("mask", ctypes.c_uint64),
        ("wanted", ctypes.c_uint64),
    )


class Filter:
    """What is allowed, ready to be loaded."""

    def __init__(self, *allowed: str) -> None:
        library = _library()
        self._library = library
        self._context = library.seccomp_init(_ACT_ERRNO | errno.EPERM)
        if not self._context:
            raise OSError(errno.ENOMEM, "no seccomp filter")
        # Optional: the calls are looked up in a tree; older libraries go through a list.
        library.seccomp_attr_set(self._context, _ATTRIBUTE_OPTIMIZE, _BINARY_TREE)
        for name in " ".join(allowed).split():
            self._add(_ACT_ALLOW, name)
        self._add(_ACT_ALLOW, "clone", mask=_CLONE_NEW | _CLONE_THREAD, wanted=_CLONE_THREAD)
        self._add(_ACT_ALLOW, "prctl", mask=_ALL_BITS, wanted=_PR_GET_DUMPABLE)
        # Its flags lie in memory, where no filter sees them; the C library then uses `clone`.
        self._add(_ACT_ERRNO | errno.ENOSYS, "clone3")

    def _add(self, action: int, name: str, *, mask: int = 0, wanted: int = 0) -> None:
        library = self._library
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:
            return  # this architecture has another call in its place
        compare = _Compare(0, _MASKED_EQUAL, mask, wanted)
        result = library.seccomp_rule_add_array(
            self._context, action, number, 1 if mask else 0, ctypes.byref(compare)
        )
        self._checked(result, f"seccomp rule of {name}")

    def load(self) -> None:
        """Confine the calling process for good; `no_new_privs` must be set."""
        self._checked(self._library.seccomp_load(self._context), "seccomp filter")

    @staticmethod
    def _checked(result: int, what: str) -> None:
        if result < 0:
            raise OSError(-result, f"{what}: {os.strerror(-result)}")


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = [ctypes.c_uint32]
    library.seccomp_attr_set.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32]
    library.seccomp_rule_add_array.argtypes = [
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.POINTER(_Compare),
    ]
    library.seccomp_load.argtypes = [ctypes.c_void_p]
    return library


CHECK = Filter(COMMON, CHECKER)
MOUNT = Filter(COMMON, MOUNTER)
SERVE = Filter(COMMON, SERVER)
