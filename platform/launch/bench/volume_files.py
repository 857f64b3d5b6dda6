"""How long the files of a paused disk take to open, on a host that has made things ahead."""

import os
import pwd
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from common.units import GiB
from hosts.guest.base import file_system
from hosts.paused_files import PausedFiles, PausedFilesConfig
from hosts.volumes.objects import StoreConfig
from launch.bench.figures import Figure
from launch.bench.rig import Host, Samples, Scale, host, timed
from launch.config import load
from launch.progress import LaunchFailed, step

BENCH = "volumes"
OPEN_AIM_MS = 100.0
OPENS_A_ROUND = 4
"""It is short, and one process of another's beside it is much of it."""

WARM_AFTER_S = 2.5
"""What is made ahead is there by then, on a machine that is not busy."""

DEVICE_BYTES = 64 * GiB
FILE_SYSTEM_TIMES = 16
"""So many times a scale's data: 4 GiB, as the platform's images have."""


def opening(store: StoreConfig, folder: Path, scale: Scale) -> Iterator[Figure]:
    """Open the files of paused disks, against the same with nothing made ahead."""
    image, user, samples = _make_image(folder, scale), disk_user(), Samples()
    opens = OPENS_A_ROUND * scale.rounds
    folder.chmod(0o711)  # the daemons' user passes through
    with host(folder, store, user=user) as one, _files_of(one) as files:
        one.folder.chmod(0o711)
        head = one.import_image(image, DEVICE_BYTES)
        with step("open files, which fetches what is read of them"):
            _open_ms(one, files, head, user)
        for number in range(1, opens + 1):
            with step(f"open files of a paused disk, {number} of {opens}"):
                one.disks.warm()
                files.warm()
                time.sleep(WARM_AFTER_S)
                samples.add("made ahead", _open_ms(one, files, head, user))
                _cool(one, files)
                samples.add("nothing", _open_ms(one, files, head, user))
    yield Figure(
        bench=BENCH,
        name="files of a paused disk, until they are open, against nothing made ahead",
        value=samples["made ahead"],
        baseline=samples["nothing"],
        unit="ms",
    )
    yield Figure(
        bench=BENCH,
        name="the same, against the aim",
        value=samples["made ahead"],
        baseline=OPEN_AIM_MS,
        unit="ms",
        aim=1.0,
    )


def disk_user() -> str | None:
    """Name whom the daemons of this checkout's platform run as; None where there is none."""
    try:
        name = load(os.environ).env["DISK_USER"]
        return pwd.getpwnam(name).pw_name
    except (LaunchFailed, KeyError):
        return None


def _make_image(folder: Path, scale: Scale) -> Path:
    """Make a file system as the platform's images have it."""
    root, image = folder / "root", folder / "image"
    (root / "etc").mkdir(parents=True)
    (root / "etc/hostname").write_text("sandbox\n")
    file_system(root, image, size_bytes=FILE_SYSTEM_TIMES * scale.data_bytes)
    return image


@contextmanager
def _files_of(one: Host) -> Iterator[PausedFiles]:
    """Serve files on a host for a while; nothing that was made ahead is left."""
    files = PausedFiles(PausedFilesConfig(one.folder / "files", one.folder / "files.log"))
    try:
        yield files
    finally:
        _cool(one, files)


def _cool(one: Host, files: PausedFiles) -> None:
    files.cool()
    one.disks.cool()


def _open_ms(one: Host, files: PausedFiles, head: str, user: str | None) -> float:
    """Open the files of a new disk; close them again, and forget it."""
    volume = one.volume(head)
    volume_id, device = volume.volume_id, one.folder / f"device-{volume.volume_id.hex}"
    device.touch(mode=0o600)
    if user is not None:
        shutil.chown(device, user)
    show = partial(one.disks.attach, volume_id, root_key=head, epoch=1, shown_at=device)
    try:
        return 1000 * timed(partial(files.open, volume_id, device, show=show))
    finally:
        files.close(volume_id)
        volume.discard()
        files.clear_dirty(volume_id)
        device.unlink()
