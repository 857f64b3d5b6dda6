"""What happens when two things happen at once: one outcome, and never two guests."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection, connections

from accounts.models import Team
from billing.models import MeterInterval
from common.errors import DomainError
from hosts.models import Host, Placement
from sandboxes import operations, services
from sandboxes.errors import QuotaExceeded
from sandboxes.models import Sandbox
from tests.fakes.host import FakeHost, fake_hypervisor

pytestmark = pytest.mark.django_db(transaction=True)

State = Sandbox.State
Claim = Callable[..., Sandbox]


def at_once(*calls: Callable[[], object]) -> list[object]:
    """Make the calls in threads of their own; return what each returned or raised."""

    def outcome(call: Callable[[], object]) -> object:
        try:
            return call()
        except DomainError as error:
            return error
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(outcome, calls))


def carry_out_everything(sandbox: Sandbox) -> None:
    """Do what each row asks for until nothing is left to do."""
    for _ in range(6):
        for operation in (operations.boot, operations.pause, operations.destroy):
            operation(sandbox.id)


def open_meters(sandbox: Sandbox) -> int:
    mine = MeterInterval.objects.filter(subject_id=sandbox.id)
    return mine.filter(period__upper_inf=True).count()


@pytest.mark.parametrize("attempt", range(4))
def test_two_claims_cannot_both_take_a_teams_last_place(
    claim: Claim, alices_team: Team, attempt: int
) -> None:
    Team.objects.update(running_limit=1)

    outcomes = at_once(claim, claim, claim)

    assert sum(isinstance(outcome, QuotaExceeded) for outcome in outcomes) == 2
    assert Sandbox.objects.count() == 1


@pytest.mark.parametrize("attempt", range(4))
def test_claims_at_once_with_one_key_make_one_sandbox(claim: Claim, attempt: int) -> None:
    def claim_with_key() -> Sandbox:
        return claim(idempotency_key="k", body_digest="d")

    outcomes = at_once(*[claim_with_key] * 4)

    assert len({outcome.id for outcome in outcomes if isinstance(outcome, Sandbox)}) == 1
    assert Sandbox.objects.count() == 1


@pytest.mark.parametrize("attempt", range(4))
def test_places_and_addresses_are_promised_once(claim: Claim, host: Host, attempt: int) -> None:
    at_once(*[claim] * 6)

    host.refresh_from_db()
    addresses = list(Placement.objects.values_list("address", flat=True))
    assert len(set(addresses)) == len(addresses) == 6
    assert host.promised_bytes == sum(p.memory_bytes for p in Placement.objects.all())


@pytest.mark.parametrize("attempt", range(4))
def test_two_resumes_make_one_run(machine: FakeHost, paused: Sandbox, attempt: int) -> None:
    at_once(*[lambda: services.resume_sandbox(sandbox=paused)] * 5)
    carry_out_everything(paused)

    paused.refresh_from_db()
    assert (paused.state, paused.runtime_generation) == (State.RUNNING, 2)
    assert open_meters(paused) == 1


@pytest.mark.parametrize("attempt", range(4))
def test_two_pauses_are_one_pause(machine: FakeHost, running: Sandbox, attempt: int) -> None:
    at_once(*[lambda: services.pause_sandbox(sandbox=running)] * 5)
    carry_out_everything(running)

    running.refresh_from_db()
    assert running.state == State.PAUSED
    assert MeterInterval.objects.count() == 1
    assert open_meters(running) == 0


@pytest.mark.parametrize("seed", range(6))
def test_pause_resume_and_delete_in_any_order_end_in_one_known_state(
    machine: FakeHost, running: Sandbox, host: Host, seed: int
) -> None:
    chance = random.Random(seed)
    wishes: list[Callable[[], object]] = [
        lambda: services.pause_sandbox(sandbox=running),
        lambda: services.resume_sandbox(sandbox=running),
        lambda: operations.pause(running.id),
        lambda: operations.boot(running.id),
        lambda: services.pause_sandbox(sandbox=running),
    ]
    if seed % 2:
        wishes.append(lambda: services.delete_sandbox(sandbox=running))
    chance.shuffle(wishes)

    at_once(*wishes)
    carry_out_everything(running)

    running.refresh_from_db()
    host.refresh_from_db()
    with fake_hypervisor() as hypervisor:
        guests = hypervisor.guests()
    assert running.state in {State.RUNNING, State.PAUSED, State.DELETED}
    assert seed % 2 == (running.state == State.DELETED)
    is_up = running.state == State.RUNNING
    assert guests == ([running.uuid] if is_up else [])
    assert open_meters(running) == is_up
    assert host.promised_bytes == (running.memory_bytes if is_up else 0)
    connection.close()


def test_who_did_what_is_on_the_record(
    machine: FakeHost, running: Sandbox, alices_team: Team
) -> None:
    services.pause_sandbox(sandbox=running, reason=Sandbox.PauseReason.TTL)

    trail = alices_team.audit_events.filter(resource_id=running.id).order_by("at")

    assert [(e.action, e.attributes) for e in trail] == [
        ("sandbox.claim", {"template": "default"}),
        ("sandbox.pause", {"reason": "ttl"}),
    ]
