"""What a start reads is learned, kept with generations, and fetched ahead at the next."""

from collections.abc import Callable
from datetime import timedelta

import pytest
import time_machine
from django.utils import timezone

from hosts.models import Generation, Volume
from sandboxes import operations, services
from sandboxes.models import Sandbox, Template
from sandboxes.watch import START_READ, Watcher
from tests.fakes.host import FakeHost


@pytest.fixture
def learned(machine: FakeHost, running: Sandbox) -> Sandbox:
    """A sandbox whose first start is over, and was looked at."""
    with time_machine.travel(timezone.now() + START_READ + timedelta(seconds=1)):
        Watcher().look()
    return running


def test_a_template_learns_from_the_first_start_of_it(
    learned: Sandbox, claim: Callable[..., Sandbox], machine: FakeHost, template: Template
) -> None:
    assert template.generation is not None
    template.generation.refresh_from_db()
    assert bytes(template.generation.start_blocks or b"") == b"start"

    another = claim()
    operations.boot(another.id)

    assert machine.disks.fetched_ahead[another.volume_id] == b"start"


def test_a_start_is_not_learned_before_it_is_over(
    machine: FakeHost, running: Sandbox, template: Template
) -> None:
    Watcher().look()
    assert template.generation is not None
    template.generation.refresh_from_db()
    assert template.generation.start_blocks is None


def test_a_pause_keeps_what_the_start_before_it_read(
    machine: FakeHost, running: Sandbox
) -> None:
    machine.disks.disks[running.volume_id].writes += 1
    services.pause_sandbox(sandbox=running)
    operations.pause(running.id)
    head = Volume.objects.select_related("head").get(pk=running.volume_id).head
    assert head is not None
    assert (head.kind, bytes(head.start_blocks or b"")) == (Generation.Kind.PAUSE, b"start")

    running.refresh_from_db()
    services.resume_sandbox(sandbox=running)
    operations.boot(running.id)

    assert machine.disks.fetched_ahead[running.volume_id] == b"start"


def test_a_template_that_has_learned_is_not_changed_by_others(
    learned: Sandbox,
    claim: Callable[..., Sandbox],
    machine: FakeHost,
    monkeypatch: pytest.MonkeyPatch,
    template: Template,
) -> None:
    another = claim()
    operations.boot(another.id)
    monkeypatch.setattr(machine.disks, "start_blocks", lambda volume_id: b"other")
    with time_machine.travel(timezone.now() + START_READ + timedelta(seconds=1)):
        Watcher().look()

    assert template.generation is not None
    template.generation.refresh_from_db()
    assert bytes(template.generation.start_blocks or b"") == b"start"
