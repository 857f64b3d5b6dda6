"""What `Disks` promises, of the real one and of the fake that stands for it elsewhere."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol
from uuid import UUID, uuid4

import pytest

from common.units import MiB
from hosts.volumes.commit import Commit
from hosts.volumes.disks import AttachedDisk, DiskHealth, Disks
from hosts.volumes.errors import (
    NotAttached,
    OverlayMismatch,
    StaleEpoch,
    StoreUnavailable,
    Uncommitted,
)
from hosts.volumes.failpoints import VARIABLE
from tests.fakes.host import FakeDisks
from tests.hosts.volumes.conftest import Host
from tests.hosts.volumes.nbd import Nbd


class Machine(Protocol):
    """A host with one volume, its head, and ways to do it harm."""

    disks: Disks | FakeDisks
    volume_id: UUID
    head: str

    def write(self) -> None: ...
    def kill_daemons(self) -> None: ...
    def kill_export(self) -> None: ...
    def set_store(self, *, up: bool) -> None: ...
    def other_root(self) -> str: ...


class FakeMachine:
    def __init__(self) -> None:
        self.fake = FakeDisks()
        self.disks: Disks | FakeDisks = self.fake
        self.volume_id = uuid4()
        self.head = f"roots/{uuid4().hex}/00000000/{0:032x}"

    def write(self) -> None:
        self.fake.disks[self.volume_id].writes += 1

    def kill_daemons(self) -> None:
        self.fake.dead.update(self.fake.disks)

    def kill_export(self) -> None:
        self.fake.dead.update(self.fake.disks)
        self.fake.unexported.update(self.fake.disks)

    def set_store(self, *, up: bool) -> None:
        self.fake.store_is_up = up

    def other_root(self) -> str:
        return f"roots/{uuid4().hex}/00000000/{1:032x}"


class RealMachine:
    def __init__(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        self._host = host
        self._monkeypatch = monkeypatch
        self.disks: Disks | FakeDisks = host.disks
        self.volume_id = host.volume_id
        self.head = host.import_base().root_key
        self._written = 0

    def write(self) -> None:
        disk = next(one for one in self.disks.attached() if one.volume_id == self.volume_id)
        with Nbd(disk.socket) as guest:
            self._written += 1
            guest.write(self._written * MiB, os.urandom(512))
            guest.flush()  # what was not flushed may die with its daemon, as on any disk

    def kill_daemons(self) -> None:
        self._host.kill_daemons()

    def kill_export(self) -> None:
        self._host.kill_daemons("export")

    def set_store(self, *, up: bool) -> None:
        self._monkeypatch.setenv(VARIABLE, "" if up else "commit.packs=fail")

    def other_root(self) -> str:
        return self._host.import_base().root_key


@pytest.fixture(params=["fake", "real"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    if request.param == "fake":
        return FakeMachine()
    return RealMachine(request.getfixturevalue("host"), monkeypatch)


def attach(machine: Machine, epoch: int = 1) -> AttachedDisk:
    return machine.disks.attach(machine.volume_id, root_key=machine.head, epoch=epoch)


class Publisher:
    """Moves the head and notes with what it was called."""

    def __init__(self, machine: Machine, told: list[Commit]) -> None:
        self._machine = machine
        self._told = told

    def __call__(self, commit: Commit) -> None:
        self._told.append(commit)
        self._machine.head = commit.root_key


def refuse(commit: Commit) -> None:
    raise StoreUnavailable("the database said no")


def test_attaching_twice_is_attaching_once(machine: Machine) -> None:
    assert machine.disks.health(machine.volume_id) is DiskHealth.ABSENT
    first = attach(machine)
    machine.write()

    assert attach(machine) == first
    assert (first.volume_id, first.epoch) == (machine.volume_id, 1)
    assert first.root_key == machine.head
    assert machine.disks.attached() == [first]
    assert machine.disks.health(machine.volume_id) is DiskHealth.ATTACHED
    with pytest.raises(Uncommitted):
        machine.disks.detach(machine.volume_id, discard=False)


def test_a_commit_moves_on_from_what_changed(machine: Machine) -> None:
    told: list[Commit] = []
    publish = Publisher(machine, told)
    attach(machine)
    before = machine.head
    assert machine.disks.checkpoint(machine.volume_id, publish) is None
    assert told == []

    machine.write()
    checkpoint = machine.disks.checkpoint(machine.volume_id, publish)
    assert machine.disks.health(machine.volume_id) is DiskHealth.ATTACHED
    assert attach(machine).root_key == machine.head
    machine.write()
    commit = machine.disks.commit(machine.volume_id, publish)

    assert checkpoint is not None
    assert commit is not None
    assert told == [checkpoint, commit]
    assert len({before, checkpoint.root_key, commit.root_key}) == 3
    assert commit.root_key.startswith(f"roots/{machine.volume_id.hex}/00000001/")
    assert machine.disks.health(machine.volume_id) is DiskHealth.DEAD
    assert machine.disks.commit(machine.volume_id, publish) is None
    for _ in range(2):
        machine.disks.detach(machine.volume_id, discard=False)
    assert machine.disks.health(machine.volume_id) is DiskHealth.ABSENT
    assert machine.disks.attached() == []


def test_a_death_is_noticed_and_attaching_again_keeps_what_was_written(
    machine: Machine,
) -> None:
    told: list[Commit] = []
    attach(machine)
    machine.write()
    machine.kill_daemons()

    assert machine.disks.health(machine.volume_id) is DiskHealth.DEAD
    with pytest.raises(NotAttached):
        machine.disks.checkpoint(machine.volume_id, Publisher(machine, told))
    attach(machine)
    assert machine.disks.health(machine.volume_id) is DiskHealth.ATTACHED
    assert machine.disks.checkpoint(machine.volume_id, Publisher(machine, told)) is not None


def test_a_disk_of_which_only_the_export_died_is_mended(machine: Machine) -> None:
    attach(machine)
    machine.write()
    machine.kill_export()
    assert machine.disks.health(machine.volume_id) is DiskHealth.DEAD

    assert machine.disks.mend(machine.volume_id)
    assert machine.disks.health(machine.volume_id) is DiskHealth.ATTACHED

    machine.kill_daemons()
    assert not machine.disks.mend(machine.volume_id)
    assert machine.disks.health(machine.volume_id) is DiskHealth.DEAD


@pytest.mark.parametrize("operation", ["checkpoint", "commit"])
def test_writes_outlast_a_store_that_is_away_and_a_head_that_does_not_move(
    machine: Machine, operation: str
) -> None:
    told: list[Commit] = []
    carry_out = getattr(machine.disks, operation)
    attach(machine)
    machine.write()

    machine.set_store(up=False)
    with pytest.raises(StoreUnavailable):
        carry_out(machine.volume_id, Publisher(machine, told))
    assert told == []
    machine.set_store(up=True)
    with pytest.raises(StoreUnavailable):
        carry_out(machine.volume_id, refuse)
    with pytest.raises(Uncommitted):
        machine.disks.detach(machine.volume_id, discard=False)
    assert carry_out(machine.volume_id, Publisher(machine, told)) is not None
    assert len(told) == 1


def test_a_cut_names_the_root_of_its_moment(machine: Machine) -> None:
    told: list[Commit] = []
    publish = Publisher(machine, told)
    attach(machine)
    unchanged = machine.disks.cut(machine.volume_id, publish)
    assert (unchanged.root_key, unchanged.commit) == (machine.head, None)

    machine.write()
    changed = machine.disks.cut(machine.volume_id, publish)
    assert changed.commit is not None
    assert changed.root_key == changed.commit.root_key == machine.head
    assert machine.disks.cut(machine.volume_id, publish).root_key == machine.head
    assert len(told) == 1


def test_what_waits_to_be_stored_shows_from_outside(machine: Machine) -> None:
    publish = Publisher(machine, [])
    assert not machine.disks.has_written(machine.volume_id)
    assert machine.disks.look() == []
    attach(machine)
    assert not machine.disks.has_written(machine.volume_id)
    assert machine.disks.log_bytes(machine.volume_id) == 0

    machine.write()
    assert machine.disks.has_written(machine.volume_id)
    look = machine.disks.look()[0]
    assert (look.volume_id, look.root_key) == (machine.volume_id, machine.head)
    assert look.is_served
    assert look.log_bytes == machine.disks.log_bytes(machine.volume_id) > 0
    assert look.written_at_ns

    machine.disks.checkpoint(machine.volume_id, publish, background=True)
    assert not machine.disks.has_written(machine.volume_id)
    look = machine.disks.look()[0]
    assert (look.root_key, look.log_bytes, look.written_at_ns) == (machine.head, 0, 0)
    assert not machine.disks.is_uploading(machine.volume_id)
    machine.kill_daemons()
    assert not machine.disks.look()[0].is_served


def test_a_writer_is_held_and_let_go_around_the_cut(machine: Machine) -> None:
    notes: list[str] = []

    @contextmanager
    def held() -> Iterator[None]:
        notes.append("held")
        yield
        notes.append("let go")

    attach(machine)
    machine.write()
    machine.disks.checkpoint(
        machine.volume_id, lambda _: notes.append("published"), around_cut=held
    )

    assert notes == ["held", "let go", "published"]


def test_an_epoch_and_a_root_must_fit_what_is_here(machine: Machine) -> None:
    attach(machine, 5)
    with pytest.raises(StaleEpoch):
        attach(machine, 4)
    machine.write()
    other = machine.other_root()
    with pytest.raises(OverlayMismatch):
        machine.disks.attach(machine.volume_id, root_key=other, epoch=5)
    # Nothing can publish what was written in an epoch that is over.
    assert machine.disks.attach(machine.volume_id, root_key=other, epoch=6).root_key == other
    machine.disks.detach(machine.volume_id, discard=False)


def test_what_is_thrown_away_by_name_is_gone(machine: Machine) -> None:
    attach(machine)
    machine.write()
    machine.disks.detach(machine.volume_id, discard=True)
    assert machine.disks.health(machine.volume_id) is DiskHealth.ABSENT


def test_a_disk_that_is_not_here_says_so(machine: Machine) -> None:
    told: list[Commit] = []
    publish = Publisher(machine, told)
    for operation in (machine.disks.commit, machine.disks.checkpoint):
        with pytest.raises(NotAttached):
            operation(machine.volume_id, publish)
    with pytest.raises(NotAttached):
        machine.disks.export_fuse(machine.volume_id, Path("/nowhere"))
    assert machine.disks.fetched(machine.volume_id).bytes == 0
    machine.disks.detach(machine.volume_id, discard=False)
