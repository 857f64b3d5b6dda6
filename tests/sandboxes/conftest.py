"""A host in memory, a template on it, and what runs there."""

import time
from collections.abc import Callable

import pytest
from django.conf import settings
from django.utils import timezone
from dramatiq.errors import Retry

from accounts.models import Team
from common.units import GiB, MiB, TiB
from hosts.models import Generation, Host, Volume
from hosts.services import publish_generation
from sandboxes import actors, operations, services
from sandboxes.models import Sandbox, Template
from tests.fakes.host import FakeHost
from tests.fakes.hypervisor import FakeHypervisor


@pytest.fixture
def host(db: None) -> Host:
    return Host.objects.create(
        name=settings.HOST_NAME,
        gate_host="127.0.0.1",
        gate_port=8022,
        gate_public_key="ssh-ed25519 AAAA",
        subnet="10.88.0.0/24",
        memory_bytes=8 * GiB,
        seen_at=timezone.now(),
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    """The host's disks, guests and agents."""
    FakeHypervisor.reset()
    machine = FakeHost()
    machine.install(monkeypatch)
    return machine


@pytest.fixture
def at_once(
    machine: FakeHost, monkeypatch: pytest.MonkeyPatch, transactional_db: None
) -> FakeHost:
    """The same, and what is sent to it is done before the sender goes on."""

    def send(actor: actors.HostActor, queue_name: str, *args: object) -> object:
        while True:
            try:
                return actor.fn(*args)
            except Retry:
                time.sleep(0.02)

    monkeypatch.setattr(actors, "send", send)
    return machine


@pytest.fixture
def template(db: None) -> Template:
    volume = Volume.objects.create()
    generation = publish_generation(
        volume.pk,
        epoch=0,
        kind=Generation.Kind.BASE,
        root_key=f"roots/{volume.pk.hex}/00000000/{0:032x}",
        size_bytes=1 * TiB,
    )
    return Template.objects.create(
        template_id="default",
        spec={
            "displayName": "Default",
            "mainContainer": {"image": "x", "resources": {"memory": "512Mi"}},
        },
        memory_bytes=512 * MiB,
        generation=generation,
    )


@pytest.fixture
def claim(host: Host, template: Template, alices_team: Team) -> Callable[..., Sandbox]:
    def claim_one(team: Team = alices_team, **fields: object) -> Sandbox:
        return services.claim_sandbox(
            team=team,
            template_id=template.template_id,
            **fields,  # type: ignore[arg-type]
        )

    return claim_one


@pytest.fixture
def running(machine: FakeHost, claim: Callable[..., Sandbox]) -> Sandbox:
    """A sandbox that runs."""
    sandbox = claim()
    operations.boot(sandbox.id)
    sandbox.refresh_from_db()
    return sandbox


@pytest.fixture
def paused(machine: FakeHost, running: Sandbox) -> Sandbox:
    """A sandbox that sleeps."""
    services.pause_sandbox(sandbox=running)
    operations.pause(running.id)
    running.refresh_from_db()
    return running
