"""Lets a disk's daemon show its device to the confinement that serves a paused volume.

The daemon runs as a user of its own: it must reach the FUSE device, and its mounts are
closed to all others, root included, unless the machine permits it to say otherwise.

Source: fuse(8), `user_allow_other`; systemd's 50-udev-default.rules, which give the device
to everybody where udev runs.
"""

from pathlib import Path

FUSE_DEVICE = Path("/dev/fuse")
FUSE_CONF = Path("/etc/fuse.conf")
OPTION = "user_allow_other"


def allow_other(path: Path = FUSE_CONF) -> bool:
    """Permit FUSE mounts that other users can enter; return whether that was new."""
    text = path.read_text() if path.exists() else ""
    if OPTION in text.split("\n"):
        return False
    if text and not text.endswith("\n"):
        text += "\n"
    path.write_text(f"{text}{OPTION}\n")
    return True


def open_device(path: Path = FUSE_DEVICE) -> None:
    """Let everybody use FUSE, as udev does; fusermount decides what each may mount."""
    path.chmod(0o666)
