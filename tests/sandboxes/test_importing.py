"""A worker that is killed while it makes a template of an upload."""

import os
import signal
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from random import Random

import pytest
import time_machine
from django.conf import settings
from django.utils import timezone

from accounts.models import Team
from common.units import MiB
from hosts import local
from hosts.collection import Collector
from hosts.image_exports import ExportsConfig, ImageExports
from hosts.keys import DatabaseKeys
from hosts.models import Generation, StoredObject
from hosts.volumes.blocks import BLOCK_BYTES
from hosts.volumes.cache import ObjectCache
from hosts.volumes.commit import load_root
from hosts.volumes.objects import StoreConfig
from hosts.volumes.reader import ReaderMemory, VolumeReader
from hosts.volumes.store import S3ObjectStore
from sandboxes import importing, services, templates
from sandboxes.errors import TemplateNotReady
from sandboxes.models import Sandbox, Template
from tests.killed import Processes, processes
from tests.s3 import s3, s3_server

__all__ = ["processes", "s3", "s3_server"]

pytestmark = pytest.mark.django_db(transaction=True)

GRACE = timedelta(hours=6)
BLOCKS = 200
FAILPOINTS = ("commit.packs", "commit.leaves", "commit.root")
CALLS = ("publish_commit", "make_ready")
"""Of the module that imports: the worker dies as it calls them."""

UNLINK = "unlink"
"""Of the image, when its template is ready."""


def import_elsewhere(
    template_pk: str, store: dict[str, str], run_dir: str, intake: str, dies_at: str
) -> None:
    """Be the worker that stores an image, and die as a function is called."""
    settings.RUN_DIR = Path(run_dir)
    config = StoreConfig(**store)
    exports = ImageExports(ExportsConfig(Path(run_dir) / "images", Path(intake), config))
    objects = S3ObjectStore(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "image_exports", lambda: exports)
        patch.setattr(local, "object_store", lambda: objects)
        if dies_at:
            where = Path if dies_at == UNLINK else importing
            patch.setattr(where, dies_at, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        importing.import_template(template_pk)


@pytest.fixture
def template(alices_team: Team) -> Template:
    """A template whose image has arrived."""
    return Template.objects.create(
        team=alices_team,
        template_id="mine",
        spec={"mainContainer": {"image": "x", "resources": {"memory": "512Mi"}}},
        creation=Template.Creation.CREATING,
    )


@pytest.fixture
def content() -> bytes:
    return Random(3).randbytes(BLOCKS * BLOCK_BYTES)


@pytest.fixture
def image(tmp_path: Path, template: Template, content: bytes) -> Path:
    """What was taken in for it."""
    intake = tmp_path / "intake"
    intake.mkdir()
    path = intake / f"{importing.image_id(template.pk).hex}.raw"
    path.write_bytes(content)
    return path


@pytest.fixture
def work(
    processes: Processes, tmp_path: Path, s3: StoreConfig, template: Template, image: Path
) -> Callable[..., int]:
    """Have a worker import the image, and die somewhere."""

    def work(dies_at: str = "") -> int:
        call = dies_at if dies_at in (*CALLS, UNLINK) else ""
        failpoint = f"{dies_at}=kill" if dies_at in FAILPOINTS else ""
        return processes.run(
            import_elsewhere,
            str(template.pk),
            asdict(s3),
            str(tmp_path),
            str(image.parent),
            call,
            failpoints=failpoint,
        )

    return work


def read_back(store: S3ObjectStore, template: Template, folder: Path) -> bytes:
    assert template.generation is not None
    cache = ObjectCache(folder / "cold", budget_bytes=64 * MiB, reader=store, patience_s=0)
    keyring = local.keyring()
    root = load_root(store, template.generation.root_key, keyring)
    reader = VolumeReader(root, ReaderMemory(cache), keyring)
    return b"".join(reader.read_block(number) for number in range(BLOCKS))


def stored_keys(store: S3ObjectStore) -> set[str]:
    kinds = ("packs/", "leaves/", "roots/")
    return {key for kind in kinds for key, _ in store.keys(kind)}


def collect_later(store: S3ObjectStore, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collect and sweep, each a grace after what came before."""
    cache = ObjectCache(folder / "cold", budget_bytes=64 * MiB, reader=store, patience_s=0)
    began_at = timezone.now()
    for number in range(1, 4):
        now = began_at + number * 2 * GRACE
        with monkeypatch.context() as patch:
            # Not the process's own clock: the store looks at the time of a request.
            patch.setattr("hosts.collection.timezone.now", lambda now=now: now)
            Collector(store, cache, DatabaseKeys(), grace=GRACE).collect()
            Collector(store, cache, DatabaseKeys(), grace=GRACE).sweep_orphans()


@pytest.mark.parametrize("step", [*FAILPOINTS, *CALLS])
def test_an_import_that_is_killed_is_done_again_and_leaves_nothing(
    work: Callable[..., int],
    template: Template,
    *,
    image: Path,
    content: bytes,
    s3: StoreConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    store = S3ObjectStore(s3)
    assert work(step) == -signal.SIGKILL, f"{step} was not reached"
    template.refresh_from_db()
    assert (template.creation, template.generation) == (Template.Creation.CREATING, None)
    assert not Generation.objects.exists()
    assert image.exists(), "it is the only copy"

    assert work() == 0  # the queue brings the message again
    template.refresh_from_db()
    assert template.creation == Template.Creation.READY
    assert Generation.objects.count() == 1
    assert read_back(store, template, tmp_path) == content
    assert not list(image.parent.iterdir())
    assert work() == 0  # and once more, too late
    assert Generation.objects.count() == 1

    collect_later(store, tmp_path, monkeypatch)
    rows = set(StoredObject.objects.values_list("key", flat=True))
    assert stored_keys(store) == rows
    assert read_back(store, template, tmp_path) == content


def test_an_import_that_is_killed_after_all_is_stored_is_not_done_twice(
    work: Callable[..., int], template: Template, image: Path, s3: StoreConfig
) -> None:
    assert work(UNLINK) == -signal.SIGKILL
    template.refresh_from_db()
    assert template.creation == Template.Creation.READY
    stored = stored_keys(S3ObjectStore(s3))
    assert work() == 0
    assert stored_keys(S3ObjectStore(s3)) == stored
    assert Generation.objects.count() == 1
    assert not image.exists()


@pytest.mark.parametrize("step", [*FAILPOINTS, *CALLS])
def test_an_import_that_is_killed_and_never_done_again_fails_and_leaves_nothing(
    work: Callable[..., int],
    template: Template,
    *,
    image: Path,
    s3: StoreConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    store = S3ObjectStore(s3)
    assert work(step) == -signal.SIGKILL
    assert stored_keys(store)

    with time_machine.travel(timezone.now() + templates.IMPORT_GIVE_UP + timedelta(minutes=1)):
        templates.fail_stuck_imports()
    template.refresh_from_db()
    assert template.creation == Template.Creation.FAILED
    assert "not stored in time" in template.creation_error
    collect_later(store, tmp_path, monkeypatch)
    assert not stored_keys(store)
    assert not StoredObject.objects.exists()

    os.utime(image, (0, 0))
    exports = ImageExports(ExportsConfig(tmp_path / "images", image.parent, s3))
    monkeypatch.setattr(local, "image_exports", lambda: exports)
    importing.drop_left_over_images()
    assert not list(image.parent.iterdir())


def test_a_template_whose_import_was_killed_cannot_be_claimed(
    work: Callable[..., int], template: Template, image: Path, alices_team: Team
) -> None:
    assert work("make_ready") == -signal.SIGKILL
    with pytest.raises(TemplateNotReady):
        services.claim_sandbox(team=alices_team, template_id="mine")
    assert not Sandbox.objects.exists()
