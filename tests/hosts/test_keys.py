"""Data keys: wrapped, one for each owner, rotated without touching packs, destroyed once."""

import base64
import os
from pathlib import Path
from uuid import uuid4

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from pytest_django.fixtures import Settings

from hosts import keys
from hosts.keys import (
    DatabaseKeys,
    LocalMasterKey,
    MasterKeyUnfit,
    data_key_of,
    destroy,
    master_keys,
    rotate,
)
from hosts.models import DataKey, Volume
from hosts.services import new_volume
from hosts.volumes.errors import KeyDestroyed, KeyMissing

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _fresh(settings: Settings) -> None:
    """Forget keys of another test, and read the settings of this one."""
    forget()


def forget() -> None:
    keys._unwrapped.clear()
    master_keys.cache_clear()


def key_of(volume: Volume) -> bytes:
    key = DatabaseKeys().keys_of([volume.pk])[volume.pk]
    assert key is not None
    return key


def key_file(folder: Path, name: str) -> str:
    path = folder / name
    path.write_text(base64.b64encode(os.urandom(32)).decode() + "\n")
    return str(path)


class Kms:
    """A master key that is elsewhere: asked by name, and known by a class alone."""

    key_id = "kms/1"
    inner = LocalMasterKey(b"k" * 32)

    def wrap(self, key: bytes, *, context: str) -> bytes:
        return self.inner.wrap(key, context=context)

    def unwrap(self, wrapped: bytes, *, context: str) -> bytes:
        return self.inner.unwrap(wrapped, context=context)


def test_each_volume_has_a_key_and_keeps_it() -> None:
    one, two, other = new_volume(owner="7"), new_volume(owner="7"), new_volume(owner="8")

    assert len({key_of(volume) for volume in (one, two, other)}) == 3
    before = key_of(one)
    forget()
    assert key_of(one) == before


def test_a_volume_can_be_made_where_no_master_key_is(settings: Settings) -> None:
    settings.MASTER_KEY = settings.MASTER_KEY_FILE = ""
    volume = new_volume(owner="7")

    with pytest.raises(ImproperlyConfigured):
        DatabaseKeys().keys_of([volume.pk])
    assert DataKey.objects.get(owner="7").wrapped is None


def test_two_hosts_that_make_a_key_at_once_have_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    volume = new_volume(owner="7")
    stale = DataKey.objects.get(owner="7")
    first = key_of(volume)

    assert keys.volume_key(stale, volume.pk) == first


def test_a_data_key_is_not_in_the_database_in_the_clear() -> None:
    volume = new_volume(owner="7")
    key_of(volume)
    row = DataKey.objects.get(owner="7")
    assert row.wrapped is not None
    plain = master_keys()[0].unwrap(bytes(row.wrapped), context="7")

    assert plain not in bytes(row.wrapped)
    assert row.master_key_id == master_keys()[0].key_id


def test_a_row_that_was_given_to_another_owner_does_not_open() -> None:
    key_of(new_volume(owner="7"))
    thief = new_volume(owner="8")
    key_of(thief)
    DataKey.objects.filter(owner="8").update(wrapped=DataKey.objects.get(owner="7").wrapped)
    forget()

    with pytest.raises(MasterKeyUnfit):
        DatabaseKeys().keys_of([thief.pk])


def test_a_volume_of_the_release_before_is_plain() -> None:
    volume = Volume.objects.create()

    assert DatabaseKeys().keys_of([volume.pk]) == {volume.pk: None}


def test_a_volume_that_is_not_known_has_no_key() -> None:
    with pytest.raises(KeyMissing):
        DatabaseKeys().keys_of([uuid4()])


def test_rotation_rewraps_every_key_and_changes_none(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "REWRAP_BATCH", 2)
    old, new = key_file(tmp_path, "old"), key_file(tmp_path, "new")
    settings.MASTER_KEY, settings.MASTER_KEY_FILE = "", old
    volumes = [new_volume(owner=str(number)) for number in range(5)]
    before = [key_of(volume) for volume in volumes]
    new_volume(owner="never used")

    settings.MASTER_KEY_FILE, settings.MASTER_KEY_FILE_PREVIOUS = new, [old]
    forget()
    assert [key_of(volume) for volume in volumes] == before
    forget()
    assert rotate() == 5
    assert rotate() == 0

    settings.MASTER_KEY_FILE_PREVIOUS = []
    forget()
    assert [key_of(volume) for volume in volumes] == before


def test_the_command_says_how_many_keys_it_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    key_of(new_volume(owner="7"))
    DataKey.objects.update(master_key_id=master_keys()[0].key_id)
    call_command("rotate_master_key")

    assert "0 data keys wrapped anew" in capsys.readouterr().out


def test_a_master_key_that_is_gone_is_named(settings: Settings, tmp_path: Path) -> None:
    volume = new_volume(owner="7")
    key_of(volume)
    settings.MASTER_KEY, settings.MASTER_KEY_FILE = "", key_file(tmp_path, "other")
    forget()

    with pytest.raises(MasterKeyUnfit, match=DataKey.objects.get().master_key_id):
        DatabaseKeys().keys_of([volume.pk])


def test_a_class_can_keep_the_master_key(settings: Settings) -> None:
    settings.MASTER_KEY_CLASS = f"{__name__}.Kms"
    volume = new_volume(owner="7")

    assert key_of(volume)
    assert DataKey.objects.get().master_key_id == "kms/1"


@pytest.mark.parametrize("text", ["", "short", "bm90IDMyIGJ5dGVz", "%%%"])
def test_a_bad_master_key_is_refused_and_not_shown(
    settings: Settings, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "bad"
    path.write_text(text)
    settings.MASTER_KEY, settings.MASTER_KEY_FILE = "", str(path)

    with pytest.raises(ImproperlyConfigured) as raised:
        master_keys()
    assert not text or text not in str(raised.value)


def test_a_destroyed_key_is_gone_for_every_process_and_is_not_made_again() -> None:
    volume = new_volume(owner="7")
    key_of(volume)
    stale = DataKey.objects.get(owner="7")
    destroy("7")
    destroy("7")

    with pytest.raises(KeyDestroyed):
        DatabaseKeys().keys_of([volume.pk])
    with pytest.raises(KeyDestroyed):
        new_volume(owner="7")
    with pytest.raises(KeyDestroyed):
        data_key_of("7")
    assert DataKey.objects.get(owner="7").wrapped is None
    # A host that read the row before it was destroyed cannot bring the key back.
    stale.wrapped = None
    with pytest.raises(KeyDestroyed):
        keys.volume_key(stale, volume.pk)


def test_an_owner_that_was_never_here_can_be_destroyed_and_the_platform_cannot() -> None:
    destroy("9")
    with pytest.raises(KeyDestroyed):
        new_volume(owner="9")
    with pytest.raises(ValueError, match="never destroyed"):
        destroy("")
