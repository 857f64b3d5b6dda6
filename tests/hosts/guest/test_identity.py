"""What of a disk is made this machine's own."""

import os
from pathlib import Path

import pytest

from hosts.guest import identity, spawn

MINE, THEIRS = "a" * 32, "b" * 32


@pytest.fixture
def machine_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "machine-id"
    monkeypatch.setattr(identity, "_MACHINE_ID", str(path))
    return path


@pytest.fixture
def renewals(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    seen: list[bool] = []
    monkeypatch.setattr(identity, "_renew_ssh_keys", lambda: seen.append(True))
    return seen


@pytest.mark.parametrize("before", [None, "", f"{MINE}\n"])
def test_a_machine_keeps_its_id_and_its_keys(
    machine_id: Path, renewals: list[bool], before: str | None
) -> None:
    if before is not None:
        machine_id.write_text(before)

    identity._set_machine_id({"machine_id": MINE})

    assert machine_id.read_text() == f"{MINE}\n"
    assert not renewals


def test_a_disk_that_was_anothers_gets_this_machines_id_and_new_keys(
    machine_id: Path, renewals: list[bool]
) -> None:
    machine_id.write_text(f"{THEIRS}\n")

    identity._set_machine_id({"machine_id": MINE})

    assert machine_id.read_text() == f"{MINE}\n"
    assert renewals == [True]


def test_keys_of_an_installed_server_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["ssh_host_ed25519_key", "ssh_host_ed25519_key.pub", "sshd_config"]
    removed: list[str] = []
    started: list[list[str]] = []
    monkeypatch.setattr(os, "listdir", lambda _: names)
    monkeypatch.setattr(os.path, "exists", lambda _: True)
    monkeypatch.setattr(identity, "_remove", removed.append)
    monkeypatch.setattr(spawn, "start_quietly", started.append)

    identity._renew_ssh_keys()

    assert removed == ["/etc/ssh/ssh_host_ed25519_key", "/etc/ssh/ssh_host_ed25519_key.pub"]
    assert started == [["/usr/bin/ssh-keygen", "-A"]]
