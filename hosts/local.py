"""This machine as a host: its drivers, made from the settings. Used by its worker alone."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from uuid import UUID

from django.conf import settings

from hosts.errors import GuestBusy
from hosts.hypervisor import Accelerator, Hypervisor, HypervisorConfig
from hosts.image_exports import ExportsConfig, ImageExports
from hosts.keys import DatabaseKeys
from hosts.libvirt_driver import LibvirtHypervisor
from hosts.models import Host
from hosts.paused_files import DEAD_MOUNT, PausedFiles, PausedFilesConfig
from hosts.volumes.disks import Disks, DisksConfig
from hosts.volumes.keys import Keyring
from hosts.volumes.store import S3ObjectStore, StoreConfig


def this_host() -> Host:
    """Return this machine's row."""
    return Host.objects.get(name=settings.HOST_NAME)


def is_this(host: Host | None) -> bool:
    """Tell whether a host is this machine, without asking anybody."""
    return host is not None and host.name == settings.HOST_NAME


def store_config() -> StoreConfig:
    """Return where objects are kept, and with which keys."""
    return StoreConfig(
        endpoint_url=settings.S3_ENDPOINT_URL,
        bucket=settings.S3_BUCKET,
        access_key_id=settings.S3_ACCESS_KEY_ID,
        secret_access_key=settings.S3_SECRET_ACCESS_KEY,
        region=settings.S3_REGION,
        prefix=settings.S3_PREFIX,
    )


@cache
def object_store() -> S3ObjectStore:
    """Return this process's client of the object store."""
    return S3ObjectStore(store_config())


def keyring() -> Keyring:
    """Return the keys of volumes, for one piece of work."""
    return Keyring(DatabaseKeys())


@cache
def disks() -> Disks:
    """Return the disks that are attached to this host."""
    return Disks(
        DisksConfig(
            run_dir=settings.RUN_DIR,
            state_dir=settings.STATE_DIR,
            store=store_config(),
            cache_budget_bytes=settings.CACHE_BUDGET_BYTES,
            log_budget_bytes=settings.LOG_BUDGET_BYTES,
            layer_budget_bytes=settings.LAYER_BUDGET_BYTES,
            keys=DatabaseKeys(),
            user=settings.DISK_USER or None,
            socket_group=settings.SOCKET_GROUP or None,
        )
    )


@cache
def paused_files() -> PausedFiles:
    """Return the servers of paused volumes' files on this host."""
    return PausedFiles(
        PausedFilesConfig(
            files_dir=settings.RUN_DIR / "files",
            log_file=settings.STATE_DIR / "log" / "paused-files.log",
        )
    )


@cache
def image_exports() -> ImageExports:
    """Return what sends disks of this host's as files."""
    return ImageExports(
        ExportsConfig(
            images_dir=settings.RUN_DIR / "images",
            intake_dir=settings.STATE_DIR / "intake",
            store=store_config(),
            user=settings.DISK_USER or None,
        )
    )


def accelerator() -> Accelerator:
    """Return the accelerator that a probe guest booted with on this machine."""
    found = json.loads((settings.IMAGES_DIR / "accelerator.json").read_text())
    return "kvm" if found["accelerator"] == "kvm" else "tcg"


def hypervisor_config() -> HypervisorConfig:
    """Return how guests are run on this machine."""
    return HypervisorConfig(
        uri=settings.LIBVIRT_URI,
        images_dir=settings.IMAGES_DIR,
        network=settings.GUEST_NETWORK,
        accelerator=accelerator(),
    )


def hypervisor() -> Hypervisor:
    """Open a connection to this machine's hypervisor; close it by leaving its `with`."""
    return LibvirtHypervisor(hypervisor_config())


def channel_path(guest_uuid: UUID) -> Path:
    """Return the socket of a guest's second door."""
    return Path(settings.RUN_DIR) / "guests" / guest_uuid.hex / "agent.sock"


def serial_log_path(guest_uuid: UUID) -> Path:
    """Return the file that a guest's serial console is written to."""
    return Path(settings.STATE_DIR) / "log" / "guests" / f"{guest_uuid.hex}.log"


def device_file(volume_id: UUID) -> Path:
    """Return the file that a paused volume's block device is shown as; made if need be.

    It belongs to the daemon that mounts the device on it.
    """
    path = Path(settings.RUN_DIR) / "devices" / volume_id.hex
    path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    try:
        path.touch(mode=0o600)
        if settings.DISK_USER and not os.path.ismount(path):
            shutil.chown(path, settings.DISK_USER)
    except OSError as error:
        # The mount of a daemon that ended: attaching the disk takes it away.
        if error.errno not in DEAD_MOUNT:
            raise
    return path


@contextmanager
def guest_lock(guest_uuid: UUID) -> Iterator[None]:
    """Be the only one on this machine who acts on a guest and its disk.

    The lock dies with its holder, whatever kills it.

    Raises:
        GuestBusy: somebody else acts on it now; come back in a moment.
    """
    folder = Path(settings.RUN_DIR) / "locks"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(folder / guest_uuid.hex, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise GuestBusy(guest_uuid) from error
        yield
    finally:
        os.close(handle)
