"""Publishing a commit: what it stored is written down with the head that names it."""

import threading
import time
from pathlib import Path

import pytest
from django import db
from django.db import connection, transaction

from hosts.models import Generation, StoredObject, Volume
from hosts.services import count_gets, new_volume
from tests.hosts.collecting import World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, db: None) -> World:
    return World(tmp_path, monkeypatch)


def sizes(world: World) -> dict[str, int]:
    return {key: len(body) for key, body in world.store.objects.items()}


def test_every_object_that_the_head_needs_has_a_row_of_its_size(world: World) -> None:
    base = world.import_volume("")
    volume = world.attach(new_volume(owner="7", head=base))
    world.write(volume, world.blocks(1, 2, 3))

    assert dict(StoredObject.objects.values_list("key", "size_bytes")) == sizes(world)
    own = StoredObject.objects.filter(volume=volume)
    assert {row.key.split("/")[1] for row in own} == {volume.pk.hex}


def test_the_same_commit_again_changes_and_counts_nothing(world: World) -> None:
    base = world.import_volume("")
    volume = world.attach(new_volume(owner="7", head=base))
    made = world.upload(volume, world.blocks(1))
    assert made is not None
    first = world.publish(volume, made, {})
    again = world.publish(volume, made, {})

    volume.refresh_from_db()
    assert again == first
    assert Generation.objects.filter(volume=volume).count() == 1
    assert volume.store_puts == len(made.objects)


def test_gets_are_added_once_however_often_they_are_told(world: World) -> None:
    volume = world.attach(new_volume(owner="7", head=world.import_volume("")))
    for told in (3, 3, 10, 7, 10):
        count_gets(volume.pk, epoch=volume.epoch, requests=told)
    world.detach(volume)
    count_gets(volume.pk, epoch=volume.epoch, requests=12)
    assert Volume.objects.get(pk=volume.pk).store_gets == 12

    again = world.attach(volume)
    count_gets(volume.pk, epoch=volume.epoch, requests=99)  # of the attachment before
    count_gets(volume.pk, epoch=again.epoch, requests=5)
    assert Volume.objects.get(pk=volume.pk).store_gets == 17


@pytest.mark.django_db(transaction=True)
def test_who_waits_for_a_head_that_moves_is_given_the_new_one(world: World) -> None:
    volume = world.attach(new_volume(owner="7", head=world.import_volume("")))
    made = world.upload(volume, world.blocks(1))
    assert made is not None
    found: list[Volume] = []

    def attach_again() -> None:
        found.append(world.attach(volume))
        db.connections.close_all()

    waiting = threading.Thread(target=attach_again)
    with transaction.atomic():
        head = world.publish(volume, made, {})
        waiting.start()
        _await_lock()
    waiting.join()
    assert found[0].head == head


def _await_lock() -> None:
    """Wait until another session of this database waits for a row."""
    deadline = time.monotonic() + 30
    with connection.cursor() as cursor:
        waits = 0
        while not waits:
            assert time.monotonic() < deadline
            time.sleep(0.02)
            cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
            waits = cursor.fetchone()[0]
