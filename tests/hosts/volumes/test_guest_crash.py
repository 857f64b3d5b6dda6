"""A real ext4 with a real journal: guest and daemons die while it is written and committed.

A guest writes files and syncs them, and beside that makes, moves and deletes others as fast
as it can. Its disk is committed all the while. What the guest says it has synced is on its
console: all of it must be there on the same host, and on another one what it had said before
the last commit was asked for that was acknowledged.
"""

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
from django.conf import settings

from common.units import MiB
from hosts.domain_xml import CMDLINE_EMULATED, TRANSLATION_CACHE_MIB
from hosts.volumes.objects import StoreConfig
from launch.bench.rig import Host, Volume
from tests.hosts.machine import need, wait_for
from tests.hosts.tiny_guest import build_images

pytestmark = [pytest.mark.guest, pytest.mark.timeout(600)]

DEVICE_BYTES = 256 * MiB
LINES = 20_000
"""Of a file; some 250 KB."""

FEWEST_SYNCED = 6
COMMIT_PAUSE_S = 0.3
BOOT_S = 240

INIT = rf"""#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t devtmpfs dev /dev; mount -t proc proc /proc; mount -t sysfs sys /sys
exec >/dev/console 2>&1 </dev/console
read -r modules < /lib/modules/boot; modprobe -a $modules
mkdir /disk
mount -t ext4 /dev/vda /disk || echo "NOT MOUNTED"
(
    n=0
    while :; do
        n=$((n + 1)); d=/disk/busy.$((n % 7))
        rm -rf $d; mkdir $d
        for f in 1 2 3 4 5; do echo "$n $f" > $d/$f; ln -s $f $d/link.$f; done
        mv $d/1 $d/moved; truncate -s $((n * 777 % 300000)) $d/2
    done
) &
n=0
while :; do
    n=$((n + 1))
    yes "this is file $n" | head -n {LINES} > /disk/new
    mv /disk/new /disk/file.$n
    sync
    echo "SYNCED $n"
    [ $n -gt 20 ] && rm /disk/file.$((n - 20))
done
"""
KEPT = 15
"""Older files may have been deleted by the guest."""


@pytest.fixture
def booted(folder: Path) -> Path:
    """What a guest boots."""
    need(met=(Path(settings.IMAGES_DIR) / "vmlinux").exists(), what="guest images")
    images = folder / "boot"
    images.mkdir()
    build_images(images, INIT)
    return images


@contextmanager
def guest(images: Path, socket: Path, console: Path) -> Iterator[None]:
    """Run a guest on a disk; it is killed at the end."""
    command = ["qemu-system-x86_64", "-machine", "q35,hpet=off", "-m", "192", "-nodefaults"]
    command += ["-accel", f"tcg,tb-size={TRANSLATION_CACHE_MIB}", "-cpu", "max,la57=off"]
    command += ["-no-user-config", "-display", "none", "-serial", f"file:{console}"]
    command += ["-kernel", str(images / "vmlinux"), "-initrd", str(images / "initrd.img")]
    command += ["-append", CMDLINE_EMULATED, "-device", "virtio-blk-pci,drive=root"]
    command += ["-drive", f"file=nbd+unix:///disk?socket={socket},if=none,id=root,format=raw"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as machine:
        try:
            yield
        finally:
            machine.kill()


def synced(console: Path) -> int:
    """Read how far the guest says that it is."""
    text = console.read_text(errors="replace") if console.exists() else ""
    assert "NOT MOUNTED" not in text
    return max((int(n) for n in re.findall(r"SYNCED (\d+)\r?\n", text)), default=0)


def make_volume(host: Host, folder: Path) -> Volume:
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(DEVICE_BYTES)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-F", str(image)], check=True)
    return host.volume(host.import_image(image, DEVICE_BYTES))


def check(volume: Volume, folder: Path, up_to: int) -> None:
    """Replay the journal of a copy, check it, and compare the files that must be there."""
    copy = folder / "copy"
    source = f"nbd+unix:///disk?socket={volume.socket}"
    convert = ["qemu-img", "convert", "-f", "raw", "-O", "raw", source, str(copy)]
    subprocess.run(convert, check=True)
    replay = ["e2fsck", "-f", "-y", "-E", "journal_only", str(copy)]
    assert subprocess.run(replay, check=False, capture_output=True).returncode in {0, 1}
    looked = subprocess.run(["e2fsck", "-fn", str(copy)], check=False, capture_output=True)
    assert looked.returncode == 0, looked.stdout.decode() + looked.stderr.decode()
    for number in range(max(1, up_to - KEPT), up_to + 1):
        dump = ["debugfs", "-R", f"cat /file.{number}", str(copy)]
        body = subprocess.run(dump, check=True, capture_output=True).stdout
        assert body == f"this is file {number}\n".encode() * LINES, f"file {number}"
    copy.unlink()


def test_a_file_system_survives_the_death_of_its_guest_and_its_daemons(
    folder: Path, s3: StoreConfig, booted: Path
) -> None:
    random = Random()
    host = Host(folder, s3)
    volume = make_volume(host, folder)
    volume.attach()
    console = folder / "console"
    acknowledged = 0
    with guest(booted, volume.socket, console):
        assert wait_for(lambda: synced(console) >= 2, timeout_s=BOOT_S), "it does not boot"
        while synced(console) < FEWEST_SYNCED or not acknowledged:
            before = synced(console)
            host.disks.checkpoint(volume.volume_id, volume.publish, background=True)
            acknowledged = before
            time.sleep(COMMIT_PAUSE_S)
        time.sleep(random.random() * 3)
        _kill(volume)
    said = synced(console)

    # Here: nothing that was synced is missing.
    volume.host.disks.attach(volume.volume_id, root_key=volume.head, epoch=volume.epoch)
    check(volume, folder, said)
    _kill(volume)

    # Elsewhere: what was committed.
    other = _other_host(host, folder)
    moved = Volume(other, volume.head, volume.volume_id, volume.epoch)
    moved.attach()
    check(moved, folder, acknowledged)
    other.close()
    host.disks.detach(volume.volume_id, discard=True)


def _other_host(host: Host, folder: Path) -> Host:
    path = folder / "o"
    path.mkdir()
    return Host(path, host.store)


def _kill(volume: Volume) -> None:
    for pid in volume.pids().values():
        subprocess.run(["kill", "-KILL", str(pid)], check=True)
    assert wait_for(lambda: not volume.pids(), timeout_s=30)
