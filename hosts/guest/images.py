"""What a guest boots from: kernel, initramfs, toolkit and base images, made from Debian.

    vmlinux            the kernel of linux-image-cloud-amd64, uncompressed
    initrd.img         static busybox and the few modules that reach the two disks
    toolkit.squashfs   sshd, Python, the agent and all modules; read-only /dev/vdb
    base-<name>.ext4   a root file system to make templates from; becomes /dev/vda

Packages are taken from the machine's own apt sources and only ever unpacked: nothing is
installed on the host. Each image carries a stamp of what it was made from, and is moved into
place only when it is whole, so that a build can be interrupted and repeated at any time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hosts.guest import base as base_images
from hosts.guest import layout
from hosts.guest.packages import host_suite, only, scratch_folder, unpack

KERNEL = "vmlinux"
INITRAMFS = "initrd.img"
TOOLKIT = "toolkit.squashfs"

KERNEL_COMMAND_LINE = (
    "console=ttyS0 quiet panic=-1 net.ifnames=0 random.trust_cpu=on "
    "no_timer_check rcupdate.rcu_expedited=1 cryptomgr.notests"
)
"""What every guest's kernel is told.

A panic ends the machine, which is then started again. Self-tests of ciphers would take a
quarter of the boot under software emulation.
"""

_KERNEL_PACKAGE = "linux-image-cloud-amd64"
_OURS = Path(__file__).parent
_INITRAMFS_SOURCES = (_OURS / "layout.py", _OURS / "files/initramfs-init")
_TOOLKIT_SOURCES = (
    _OURS / "layout.py",
    *sorted((_OURS / "files").iterdir()),
    *(_OURS / name for name in layout.AGENT_MODULES),
)

_TOOLKIT_PACKAGES = (
    "busybox-static", "e2fsprogs", "kmod", "libpython3-stdlib", "openssh-server",
    "openssh-sftp-server", "python3-minimal",
)  # fmt: skip

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Builder:
    """Makes the images of one folder; `progress` is told of each step in a sentence.

    Methods raise `packages.BuildFailed`; an image that was there before then still is.
    """

    folder: Path
    progress: Progress = field(default=lambda _: None)
    force: bool = False
    suite: str = field(default_factory=host_suite)

    def build_kernel(self) -> Path:
        """Make `vmlinux` from Debian's cloud kernel."""
        with self._image(KERNEL, _KERNEL_PACKAGE) as made:
            if made:
                kernel = only(self._kernel_tree().glob("boot/vmlinuz-*"))
                made.write_bytes(layout.uncompressed(kernel.read_bytes()))
        return self.folder / KERNEL

    def build_initramfs(self) -> Path:
        """Make `initrd.img` for the kernel that is there."""
        with self._image(
            INITRAMFS, _digest(*_INITRAMFS_SOURCES) + self._kernel_stamp()
        ) as made:
            if made:
                with scratch_folder(self.folder) as scratch:
                    layout.initramfs(scratch, self._toolkit_tree(), self._kernel_tree())
                    layout.archive(scratch, made)
        return self.folder / INITRAMFS

    def build_toolkit(self) -> Path:
        """Make `toolkit.squashfs`, whose programs run in any Linux root file system."""
        with self._image(TOOLKIT, _digest(*_TOOLKIT_SOURCES) + self._kernel_stamp()) as made:
            if made:
                with scratch_folder(self.folder) as scratch:
                    layout.toolkit(scratch, self._toolkit_tree(), self._kernel_tree())
                    self.progress("packing the toolkit")
                    layout.squash(scratch, made)
        return self.folder / TOOLKIT

    def build_base(self, name: str) -> Path:
        """Make `base-<name>.ext4`, a sparse file."""
        base = base_images.BASES[name]
        image = f"base-{name}.ext4"
        with self._image(image, base_images.recipe(base)) as made:
            if made:
                with scratch_folder(self.folder, in_memory=True) as scratch:
                    root = scratch / "root"
                    self.progress(f"installing {len(base.packages)} packages for {image}")
                    unpack(base.packages, root, variant="minbase", suite=self.suite)
                    base_images.settle(root)
                    self.progress(f"writing {image}")
                    base_images.file_system(root, made, size_bytes=base.size_bytes)
        return self.folder / image

    @contextmanager
    def _image(self, name: str, recipe: str) -> Iterator[Path | None]:
        """Yield where to write the image, or None where it is already as `recipe` says."""
        self.folder.mkdir(parents=True, exist_ok=True)
        wanted = hashlib.sha256(f"{self.suite}\n{recipe}".encode()).hexdigest()
        stamp = self.folder / f".{name}.stamp"
        image = self.folder / name
        if not self.force and image.exists() and _text(stamp) == wanted:
            self.progress(f"{name} is up to date")
            yield None
            return
        self.progress(f"building {name}")
        part = self.folder / f".{name}.{os.getpid()}.part"
        try:
            yield part
            part.chmod(0o644)
            part.replace(image)
            stamp.write_text(wanted)
        finally:
            part.unlink(missing_ok=True)

    def _kernel_stamp(self) -> str:
        return _text(self.folder / f".{KERNEL}.stamp")

    def _kernel_tree(self) -> Path:
        """Where the kernel's package lies unpacked: three images are made of it."""
        return self._unpacked("kernel", (_KERNEL_PACKAGE,))

    def _toolkit_tree(self) -> Path:
        return self._unpacked("toolkit", _TOOLKIT_PACKAGES)

    def _unpacked(self, name: str, packages: tuple[str, ...]) -> Path:
        tree = self.folder / ".packages" / self.suite / name
        if not tree.is_dir():
            self.progress(f"fetching the packages of the {name}")
            with scratch_folder(self.folder) as scratch:
                unpack(packages, scratch / "tree", variant="extract", suite=self.suite)
                tree.parent.mkdir(parents=True, exist_ok=True)
                (scratch / "tree").rename(tree)
        return tree


def forget_packages(folder: Path) -> None:
    """Drop the unpacked packages, so that the next build fetches Debian's newest."""
    shutil.rmtree(folder / ".packages", ignore_errors=True)


def _digest(*paths: Path) -> str:
    return "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in paths)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
