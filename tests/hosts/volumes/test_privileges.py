"""The daemons run as an ordinary user, who can read no more than their disk needs."""

import grp
import os
import pwd
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hosts.volumes.disks import Disks
from tests.hosts.machine import need_fuse, needs_root
from tests.hosts.volumes.conftest import IMAGE_BYTES, Host

pytestmark = needs_root

USER = "daemon"
GROUP = "games"
STRANGER = "nobody"


@pytest.fixture
def guarded(host: Host) -> Iterator[Host]:
    """A host whose daemons run as an account that every Debian has."""
    host.folder.chmod(0o711)
    host.config = replace(host.config, user=USER, socket_group=GROUP)
    host.disks = Disks(host.config)
    yield host
    host.kill_daemons()


def can_read(user: str, path: Path) -> bool:
    """Try for real, as that user."""
    done = subprocess.run(
        ["head", "-c1", path],
        user=user,
        group=user_group(user),
        check=False,
        extra_groups=[],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return done.returncode == 0


def user_group(user: str) -> int:
    return pwd.getpwnam(user).pw_gid


def test_the_daemons_are_an_ordinary_users_and_do_all_their_work(guarded: Host) -> None:
    guarded.import_base()
    folder = guarded.config.run_dir / "disks" / guarded.volume_id.hex
    with guarded.attach() as guest:
        guarded.write(guest, 0, os.urandom(100_000))
        for name in ("daemon.pid", "export.pid"):
            proc = Path("/proc") / (folder / name).read_text().strip()
            assert proc.stat().st_uid == pwd.getpwnam(USER).pw_uid
            status = dict(
                line.split(":\t", 1) for line in (proc / "status").read_text().splitlines()
            )
            assert int(status["CapEff"], 16) == 0
        assert guarded.disks.checkpoint(guarded.volume_id, guarded.publish) is not None
        guarded.write(guest, 300_000, os.urandom(100_000))
        guarded.check(guest)
    assert guarded.disks.commit(guarded.volume_id, guarded.publish) is not None
    guarded.disks.detach(guarded.volume_id, discard=False)
    guarded.empty_cache()
    with guarded.attach(2) as guest:
        guarded.check(guest)


def test_nobody_else_reads_the_secrets_the_cache_or_the_overlays(guarded: Host) -> None:
    guarded.import_base()
    with guarded.attach() as guest:
        guest.read(0, 4096)
    folder = guarded.config.run_dir / "disks" / guarded.volume_id.hex
    cached = sorted((guarded.config.cache_dir / "packs").iterdir())
    assert cached
    for path in (folder / "export.json", *cached, *guarded.overlay_files()):
        assert can_read(USER, path)
        assert not can_read(STRANGER, path)

    socket = (folder / "disk.sock").stat()
    assert socket.st_gid == grp.getgrnam(GROUP).gr_gid
    assert stat.S_IMODE(socket.st_mode) == 0o660


def test_a_disk_is_shown_as_a_file_by_an_ordinary_user(guarded: Host) -> None:
    need_fuse()
    if "\nuser_allow_other" not in Path("/etc/fuse.conf").read_text():
        pytest.skip("needs user_allow_other in /etc/fuse.conf")
    guarded.import_base()
    guarded.attach().close()
    file = guarded.folder / "disk"
    file.touch()
    guarded.config.give(file)
    guarded.disks.export_fuse(guarded.volume_id, file)
    try:
        with file.open("r+b") as disk:
            assert disk.read(IMAGE_BYTES) == guarded.expected[:IMAGE_BYTES]
            disk.seek(0)
            disk.write(b"by fuse")
    finally:
        guarded.disks.drop_fuse(guarded.volume_id)
    guarded.expect(0, b"by fuse")
    with guarded.attach() as guest:
        guarded.check(guest)
