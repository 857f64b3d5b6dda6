"""Locks by file: held across threads, and gone with what they were for."""

import threading
from pathlib import Path

import pytest

from hosts.volumes.errors import DiskBusy
from hosts.volumes.locks import forget, locked


def test_one_at_a_time_holds_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"

    with locked(path), pytest.raises(DiskBusy), locked(path, timeout_s=0.02):
        pass
    with locked(path, timeout_s=0):
        pass


def test_a_lock_that_nobody_holds_can_be_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with locked(path):
        pass

    forget(path)
    forget(path)

    assert not path.exists()


def test_a_lock_that_is_held_is_not_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"

    with locked(path):
        forget(path)
        with pytest.raises(DiskBusy), locked(path, timeout_s=0.02):
            pass


def test_forgetting_lets_no_two_in(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    inside, most, done = 0, 0, 0
    stop = threading.Event()

    def work() -> None:
        nonlocal inside, most, done
        for _ in range(100):
            with locked(path, timeout_s=30):
                inside += 1
                most = max(most, inside)
                done += 1
                inside -= 1

    def tidy() -> None:
        while not stop.is_set():
            forget(path)

    workers = [threading.Thread(target=work) for _ in range(3)]
    tidier = threading.Thread(target=tidy)
    for thread in (*workers, tidier):
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    tidier.join()

    assert (most, done) == (1, 300)
