"""Our settings in libvirt's own files."""

from pathlib import Path

import pytest

from hosts import libvirt_setup
from hosts.libvirt_setup import SETTINGS, configure, with_block


@pytest.fixture(autouse=True)
def _no_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tun").touch()
    monkeypatch.setattr(libvirt_setup, "TUN", tmp_path / "tun")
    monkeypatch.setattr(libvirt_setup, "KVM", tmp_path / "no-kvm")


def test_the_second_run_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "qemu.conf").write_text('# theirs\nuser = "them"\n')

    first = configure(tmp_path)
    written = {name: (tmp_path / name).read_text() for name in SETTINGS}
    second = configure(tmp_path)

    assert (first, second) == (True, False)
    assert written == {name: (tmp_path / name).read_text() for name in SETTINGS}
    assert written["qemu.conf"].endswith('# theirs\nuser = "them"\n')
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*SETTINGS, "tun"])


def test_a_block_of_an_older_version_is_replaced() -> None:
    old = with_block("theirs\n", "old = 1\n")

    new = with_block(old, "new = 1\n")

    assert new == with_block("theirs\n", "new = 1\n")
    assert "old" not in new


def test_a_files_mode_is_kept(tmp_path: Path) -> None:
    (tmp_path / "qemu.conf").touch(mode=0o600)

    configure(tmp_path)

    assert (tmp_path / "qemu.conf").stat().st_mode & 0o777 == 0o600
