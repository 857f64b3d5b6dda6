"""A guest that boots in seconds: the platform's kernel and a busybox that obeys its config."""

import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from django.conf import settings

from tests.hosts.machine import need

# `/lib/modules/boot` and `/bin/busybox` come from the platform's own initramfs.
INIT = r"""#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t devtmpfs dev /dev; mount -t proc proc /proc; mount -t sysfs sys /sys
exec >/dev/console 2>&1 </dev/console
read -r modules < /lib/modules/boot; modprobe -a $modules
config=$(cat /sys/firmware/qemu_fw_cfg/by_name/opt/org.sandkeep/config/raw)
echo "CONFIG=$config"
echo "DISKS=$(ls /sys/class/block | grep vd | tr '\n' ' ')"
echo "MAC=$(cat /sys/class/net/eth0/address)"
case $config in
poweroff) poweroff -f;;
reboot) reboot -f;;
panic) echo c > /proc/sysrq-trigger;;
spin) while :; do :; done;;
flood) cat /dev/zero | tr '\0' x;;
read)
    while dd if=/dev/vda of=/dev/null bs=64k count=1 iflag=direct 2>/dev/null; do
        echo READ; sleep 0.2
    done
    echo FAILED;;
echo)
    exec 3<>"/dev/$(ls /sys/class/virtio-ports)"
    # Until somebody opens the other end, reading says that there is nothing more.
    while :; do
        while read -r line <&3; do echo "got $line" >&3; done
        sleep 0.1
    done;;
esac
while :; do sleep 1000; done
"""


def build_images(directory: Path, init: str = INIT) -> None:
    """Fill the directory with a kernel, an initramfs of ours and an empty toolkit."""
    images = Path(settings.IMAGES_DIR)
    need(met=(images / "initrd.img").exists(), what="the platform's kernel and initramfs")
    (directory / "vmlinux").write_bytes((images / "vmlinux").read_bytes())
    (directory / "toolkit.squashfs").write_bytes(bytes(64 * 1024))
    with tempfile.TemporaryDirectory() as tree:
        _cpio(["-idm"], tree, (images / "initrd.img").read_bytes())
        (Path(tree) / "init").write_text(init)
        (Path(tree) / "init").chmod(0o755)
        names = "\n".join(str(path.relative_to(tree)) for path in sorted(Path(tree).rglob("*")))
        packed = _cpio(["-o", "-H", "newc"], tree, names.encode())
    (directory / "initrd.img").write_bytes(packed)


def _cpio(arguments: list[str], tree: str, stdin: bytes) -> bytes:
    return subprocess.run(
        ["cpio", *arguments], cwd=tree, input=stdin, capture_output=True, timeout=60, check=True
    ).stdout


class NbdDisk:
    """An NBD server for one guest's disk, to be stopped and started under it."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "disk.sock"
        self.image = directory / "disk.raw"
        with self.image.open("wb") as file:
            file.truncate(64 * 1024 * 1024)
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.serve()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def serve(self) -> None:
        """Serve the disk at the socket, as `disk`, to anybody."""
        self._server = subprocess.Popen(
            [
                *("qemu-nbd", "--persistent", "--shared=4", "--format=raw"),
                *("--export-name=disk", f"--socket={self.socket}", str(self.image)),
            ]
        )
        until = time.monotonic() + 10
        while not self.socket.exists():
            assert time.monotonic() < until, "qemu-nbd did not start"
            time.sleep(0.05)
        self.socket.chmod(0o666)

    def stop(self) -> None:
        """Kill the server, as a crash does."""
        if self._server is not None:
            self._server.kill()
            self._server.wait(10)
            self._server = None
        self.socket.unlink(missing_ok=True)
