"""Set this machine's libvirt up for guests: `python -m hosts.libvirt_setup`, as root.

Everything goes into one marked block at the top of libvirt's own files, so that an
administrator sees what is ours, and a second run changes nothing.
"""

import argparse
import grp
import os
import re
import shutil
import stat
import sys
from pathlib import Path

BEGIN = "# BEGIN sandkeep: written by hosts/libvirt_setup.py, changes here are lost"
END = "# END sandkeep"
BLOCK = re.compile(rf"{re.escape(BEGIN)}\n.*?{re.escape(END)}\n", re.DOTALL)

# libvirt takes the first of two equal settings, hence the top of the file.
SETTINGS = {
    "qemu.conf": (
        "# AppArmor's generated profiles know neither a disk behind a unix socket nor the\n"
        "# fw_cfg file; QEMU is held by its own user, its seccomp filter and its cgroup.\n"
        'security_driver = "none"\n'
        "seccomp_sandbox = 1\n"
        "# virtlogd writes the serial consoles and bounds them.\n"
        'stdio_handler = "logd"\n'
        "# A guest's memory, keys in it, stays out of core files.\n"
        "dump_guest_core = 0\n"
    ),
    "libvirtd.conf": (
        "# A worker has one connection and asks many things at once; at five, the default,\n"
        "# libvirtd stops reading from it, its keepalive included.\n"
        "max_client_requests = 64\n"
        "max_workers = 64\n"
    ),
    "virtlogd.conf": (
        "# A guest writes as much to its serial console as it likes: this much is kept.\n"
        "max_size = 1048576\n"
        "max_backups = 1\n"
    ),
}

TUN = Path("/dev/net/tun")
TUN_DEVICE = os.makedev(10, 200)
KVM = Path("/dev/kvm")
GROUP_MAY = stat.S_IRGRP | stat.S_IWGRP


def configure(directory: Path = Path("/etc/libvirt")) -> bool:
    """Write our settings and make the devices that guests need usable. Safe to repeat.

    Returns: whether libvirtd and virtlogd have to be restarted to see new settings;
        guests live through that.
    """
    changed = [_write_block(directory / name, text) for name, text in SETTINGS.items()]
    _make_tun()
    _open_kvm()
    return any(changed)


def with_block(content: str, settings: str) -> str:
    """Return a configuration file's content with our block at its top, once."""
    return f"{BEGIN}\n{settings}{END}\n{BLOCK.sub('', content)}"


def _write_block(path: Path, settings: str) -> bool:
    content = path.read_text() if path.exists() else ""
    wanted = with_block(content, settings)
    if wanted == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.sandkeep")
    new.write_text(wanted)
    if path.exists():
        shutil.copymode(path, new)
    new.replace(path)
    return True


def _make_tun() -> None:
    """Make /dev/net/tun where no udev does: libvirt opens it for each guest's interface."""
    if TUN.exists():
        return
    TUN.parent.mkdir(mode=0o755, exist_ok=True)
    os.mknod(TUN, stat.S_IFCHR | 0o600, TUN_DEVICE)


def _open_kvm() -> None:
    """Give /dev/kvm to its group, as udev's rules do.

    Where it belongs to root alone, libvirt 9.0 finds each time anew that what it knows of
    QEMU is out of date ("KVM was enabled when probing, but it is not available now"): a
    start then takes 76 s instead of 0.8 s.
    """
    if not KVM.exists():
        return
    try:
        group = grp.getgrnam("kvm").gr_gid
    except KeyError:
        return
    status = KVM.stat()
    if status.st_gid != group or status.st_mode & GROUP_MAY != GROUP_MAY:
        os.chown(KVM, -1, group)
        KVM.chmod(stat.S_IMODE(status.st_mode) | GROUP_MAY)


def main() -> int:
    """Run `configure` and say whether a restart is due: "restart" or "unchanged"."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("/etc/libvirt"))
    changed = configure(parser.parse_args().directory)
    sys.stdout.write("restart\n" if changed else "unchanged\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
