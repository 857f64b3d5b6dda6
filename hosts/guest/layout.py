"""Where things lie inside the images: pure copying and packing, from unpacked packages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from hosts.guest.packages import BuildFailed, only, run

TOOLKIT_PREFIX = "/run/sandkeep/toolkit"
"""Where the toolkit is mounted in every guest; its programs only run from there."""

AGENT_MODULES = (
    "agent.py", "contexts.py", "doors.py", "growth.py", "identity.py", "journal.py", "loop.py",
    "machine.py", "protocol.py", "spawn.py",
)  # fmt: skip

_OURS = Path(__file__).parent
_FILES = _OURS / "files"

_BOOT_MODULES = (
    "virtio_pci", "virtio_blk", "crc32c_generic", "crc32c_intel", "ext4", "squashfs",
    "virtio_net", "virtio_console", "virtio_rng", "virtio_balloon", "qemu_fw_cfg",
)  # fmt: skip
"""What the initramfs loads, each after what it depends on; built-in ones are passed over."""

_STDLIB_LEFT_OUT = (
    "__pycache__", "config-*", "curses", "dbm", "distutils", "ensurepip", "idlelib", "lib2to3",
    "lib-dynload", "pydoc_data", "sqlite3", "test", "tkinter", "turtledemo", "unittest",
    "wsgiref", "xmlrpc",
)  # fmt: skip
_DYNLOAD = ("_json", "_queue", "_struct", "mmap", "resource", "termios")


# By how what they write begins.
_COMPRESSIONS = {
    b"\x02\x21\x4c\x18": ("lz4", "-dc"),
    b"\x28\xb5\x2f\xfd": ("zstd", "-dc"),
    b"\xfd7zXZ": ("xz", "-dc"),
    b"\x1f\x8b": ("gzip", "-dc"),
}


def uncompressed(kernel: bytes) -> bytes:
    """Return the ELF file inside a compressed kernel, which QEMU can boot as it is.

    Uncompressing it under emulation is a seventh of the whole boot.

    Source: https://docs.kernel.org/arch/x86/boot.html, `setup_sects`, `payload_offset` and
        `payload_length`; the last four bytes of the payload are its uncompressed length.
    """
    start = (kernel[0x1F1] + 1) * 512 + int.from_bytes(kernel[0x248:0x24C], "little")
    end = start + int.from_bytes(kernel[0x24C:0x250], "little")
    payload, length = kernel[start : end - 4], kernel[end - 4 : end]
    for magic, command in _COMPRESSIONS.items():
        if payload.startswith(magic):
            # Some complain of what follows their own data, so it is the length that tells.
            done = subprocess.run(command, input=payload, capture_output=True, check=False)
            if len(done.stdout) == int.from_bytes(length, "little"):
                return done.stdout
    raise BuildFailed("the kernel is compressed in an unknown way.")


def initramfs(tree: Path, programs: Path, kernel: Path) -> None:
    """Lay out the initramfs in the empty folder `tree`.

    Args:
        tree: an empty folder.
        programs: the toolkit's packages, unpacked; busybox is taken from there.
        kernel: the kernel's package, unpacked.
    """
    for name in ("bin", "dev", "proc", "root", "run", "sys"):
        (tree / name).mkdir()
    shutil.copy(_find(programs, "bin/busybox"), tree / "bin/busybox")
    shutil.copy(_FILES / "initramfs-init", tree / "init")
    (tree / "init").chmod(0o755)
    release = only(_module_folders(kernel)).name
    modules = tree / "lib/modules" / release
    (modules / "kernel").mkdir(parents=True)
    for module in _boot_modules(kernel):
        shutil.copyfile(module, modules / "kernel" / module.name)
    run("depmod", "-b", tree, release)
    built = {path.name.removesuffix(".ko") for path in (modules / "kernel").iterdir()}
    names = [name for name in _BOOT_MODULES if {name, name.replace("_", "-")} & built]
    (tree / "lib/modules/boot").write_text(" ".join(names) + "\n")


def archive(tree: Path, image: Path) -> None:
    """Pack a folder as an initramfs; not compressed, since reading it costs less."""
    names = sorted(str(path.relative_to(tree)) for path in tree.rglob("*"))
    with image.open("wb") as file:
        subprocess.run(
            ["cpio", "--create", "--format=newc", "--owner=0:0", "--reproducible", "--quiet"],
            cwd=tree,
            input="\n".join(names).encode(),
            stdout=file,
            check=True,
        )


def toolkit(tree: Path, programs: Path, kernel: Path) -> None:
    """Lay out the toolkit in the empty folder `tree`, from the same folders as `initramfs`."""
    tree.chmod(0o755)  # the guest's other users run its sftp-server
    (tree / "bin/kmod").mkdir(parents=True)  # kmod is what its name says: here, modprobe
    (tree / "lib").mkdir()
    python = only((programs / "usr/bin").glob("python3.[0-9]*"))
    dynamic = {
        "sshd": _find(programs, "sbin/sshd"),
        "sftp-server": programs / "usr/lib/openssh/sftp-server",
        "e2fsck": _find(programs, "sbin/e2fsck"),
        "resize2fs": _find(programs, "sbin/resize2fs"),
        "kmod/modprobe": _find(programs, "bin/kmod"),
        "python3": python,
    }
    settings = (_FILES / "sshd_config").read_text()
    # OpenSSH 9.8 and 10.0 each moved a part of sshd into a program of its own.
    for helper, option in (("sshd-session", "SshdSessionPath"), ("sshd-auth", "SshdAuthPath")):
        if (programs / "usr/lib/openssh" / helper).exists():
            dynamic[helper] = programs / "usr/lib/openssh" / helper
            settings += f"{option} {TOOLKIT_PREFIX}/bin/{helper}\n"
    for name, program in dynamic.items():
        shutil.copy(program, tree / "bin" / name)
    (tree / "lib/sshd_config").write_text(settings)
    shutil.copy(_find(programs, "bin/busybox"), tree / "bin/busybox")
    shutil.copy(_FILES / "fstab", tree / "lib/fstab")
    for script in ("modprobe", "pid1"):
        shutil.copy(_FILES / script, tree / "bin" / script)
        (tree / "bin" / script).chmod(0o755)
    _lay_out_python(tree, programs, python.name)
    _relocate(tree, programs, [tree / "bin" / name for name in dynamic])
    _compile(tree, programs, python)
    modules = only(_module_folders(kernel))
    shutil.copytree(modules, tree / "lib/modules" / modules.name, symlinks=True)
    run("depmod", "-b", tree, modules.name)


def squash(tree: Path, image: Path) -> None:
    """Pack a folder as a squashfs that is quick to read, rather than small."""
    run(
        *("mksquashfs", tree, image, "-comp", "lz4", "-b", "64K"),
        *("-all-root", "-noappend", "-no-progress", "-quiet"),
    )


def _boot_modules(kernel: Path) -> Iterator[Path]:
    folder = only(_module_folders(kernel))
    base = folder.parent.parent.parent
    run("depmod", "-b", base, folder.name)
    seen: set[Path] = set()
    for module in _BOOT_MODULES:
        listed = run(
            *("modprobe", "--dirname", base, "--set-version", folder.name),
            *("--show-depends", "--ignore-install", module),
        )
        for path in map(Path, re.findall(r"^insmod (\S+)", listed, re.MULTILINE)):
            if path not in seen:
                seen.add(path)
                yield path


def _module_folders(kernel: Path) -> list[Path]:
    """The modules' folder: under /lib in Debian 12, under /usr/lib in Debian 13."""
    found = [*kernel.glob("lib/modules/*/kernel"), *kernel.glob("usr/lib/modules/*/kernel")]
    return sorted({path.parent.resolve() for path in found})


def _find(tree: Path, name: str) -> Path:
    """A program that lies under `/usr`, or beside it in releases before the merge."""
    for folder in ("usr", "."):
        if (tree / folder / name).exists():
            return (tree / folder / name).resolve()
    raise BuildFailed(f"no package brought {name}.")


def _lay_out_python(tree: Path, programs: Path, python: str) -> None:
    library = tree / "lib" / python
    source = programs / "usr/lib" / python
    shutil.copytree(source, library, ignore=shutil.ignore_patterns(*_STDLIB_LEFT_OUT))
    (library / "lib-dynload").mkdir()
    for name in _DYNLOAD:
        for module in (source / "lib-dynload").glob(f"{name}.cpython-*"):
            shutil.copy(module, library / "lib-dynload")
    ours = tree / "lib/sandkeep"
    (ours / "hosts/guest").mkdir(parents=True)
    (ours / "hosts/__init__.py").touch()
    (ours / "hosts/guest/__init__.py").touch()
    for name in AGENT_MODULES:
        shutil.copy(_OURS / name, ours / "hosts/guest" / name)
    shutil.copy(_FILES / "start_agent.py", ours)


def _relocate(tree: Path, programs: Path, binaries: Iterable[Path]) -> None:
    """Bring in every library that is needed, and have all of it found under the prefix."""
    loader = _library(programs, "ld-linux-x86-64.so.2")
    shutil.copy(loader, tree / "lib/ld-linux-x86-64.so.2")
    binaries = list(binaries)
    todo = [*binaries, *tree.glob("lib/python3*/lib-dynload/*.so")]
    # Loaded by name when a thread ends, so no program lists it.
    todo.append(_bring_library(tree, programs, "libgcc_s.so.1"))
    while todo:
        file = todo.pop()
        for name in run("patchelf", "--print-needed", file).split():
            if not (tree / "lib" / name).exists():
                todo.append(_bring_library(tree, programs, name))
        if file.name != "libc.so.6":
            run("patchelf", "--force-rpath", "--set-rpath", f"{TOOLKIT_PREFIX}/lib", file)
        if file in binaries:
            interpreter = f"{TOOLKIT_PREFIX}/lib/ld-linux-x86-64.so.2"
            run("patchelf", "--set-interpreter", interpreter, file)


def _bring_library(tree: Path, programs: Path, name: str) -> Path:
    return Path(shutil.copy(_library(programs, name), tree / "lib" / name))


def _library(programs: Path, name: str) -> Path:
    for folder in ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "lib64", "usr/lib64"):
        path = programs / folder / name
        if path.exists() or path.is_symlink():
            return _resolve_inside(programs, path)
    raise BuildFailed(f"no package brought {name}.")


def _resolve_inside(root: Path, path: Path) -> Path:
    """Follow links as the tree's own programs would, absolute ones from `root`."""
    while path.is_symlink():
        target = os.readlink(path)  # noqa: PTH115 - Path.readlink would drop a leading //
        path = root / target.lstrip("/") if target.startswith("/") else path.parent / target
    return path


def _compile(tree: Path, programs: Path, python: Path) -> None:
    """Compile every module ahead, with the very Python that will load it.

    The library is left without sources, which halves it and saves the look-ups; our own
    modules keep theirs, so that a traceback shows the line.
    """
    loader = _library(programs, "ld-linux-x86-64.so.2")
    folders = (programs / name for name in ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"))
    path = ":".join(str(folder) for folder in folders)
    command = (loader, "--library-path", path, python, "-S", "-m", "compileall", "-q", "-f")
    env = {"PYTHONHOME": str(programs / "usr")}
    library = tree / "lib" / python.name
    unchecked = ("--invalidation-mode", "unchecked-hash", "-s", str(tree), "-p", TOOLKIT_PREFIX)
    run(*command, "-b", "-o", "2", *unchecked, library, env=env)
    for source in library.rglob("*.py"):
        source.unlink()
    run(*command, *unchecked, tree / "lib/sandkeep", env=env)
