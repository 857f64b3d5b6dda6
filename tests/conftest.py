"""The cast that most tests share.

Alice is an admin of her team and calls the API with its key; Bob, her colleague, may only
look. Mallory has a team of her own, and must never see what is Alice's.

Async tests that use the database need `@pytest.mark.django_db(transaction=True)`: their
calls run in threads of their own, which see only what was committed.
"""

import os
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.cache import cache
from django.db import connection
from django.test import Client
from dramatiq.brokers.stub import StubBroker
from pytest_django import DjangoDbBlocker
from rest_framework.test import APIClient

from accounts.models import ApiKey, Membership, Role, Team, User
from accounts.services import create_api_key, create_team
from common.api import database
from common.queue import broker

PASSWORD = "correct horse battery"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail in CI what is skipped elsewhere: there, nothing that a test needs may be missing."""
    report = yield
    if report.skipped and os.environ.get("CI"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, and nothing is in CI: {call.excinfo}"
    return report


@pytest.fixture(scope="session")
def django_db_setup(
    django_db_setup: None, django_db_blocker: DjangoDbBlocker
) -> Iterator[None]:
    """End what threads of other tests still hold before the database is dropped."""
    yield
    with django_db_blocker.unblock(), connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


@pytest.fixture(autouse=True)
def _database_of_the_test(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let async views see the rows of a test that never commits."""
    marker = request.node.get_closest_marker("django_db")
    committed = bool(marker and marker.kwargs.get("transaction"))
    if committed or "transactional_db" in request.fixturenames:
        return

    async def in_this_thread(call: Callable[[], Any]) -> Any:
        return await sync_to_async(call, thread_sensitive=True)()

    monkeypatch.setattr(database, "_submit", in_this_thread)


@pytest.fixture
def _empty_cache() -> Iterator[None]:
    """Forget rate limits and counters of other tests."""
    cache.clear()
    yield
    cache.clear()


@pytest.fixture
def queue() -> Iterator[StubBroker]:
    assert isinstance(broker, StubBroker)
    yield broker
    broker.flush_all()


@pytest.fixture
def alice_user(db: None) -> User:
    return User.objects.create_user("alice@example.com", PASSWORD, name="Alice")


@pytest.fixture
def alices_team(alice_user: User) -> Team:
    return create_team(name="Alice's team", owner=alice_user)


@pytest.fixture
def bob_user(alices_team: Team) -> User:
    user = User.objects.create_user("bob@example.com", PASSWORD, name="Bob")
    Membership.objects.create(team=alices_team, user=user, role=Role.VIEWER)
    return user


@pytest.fixture
def mallory_user(db: None) -> User:
    return User.objects.create_user("mallory@example.com", PASSWORD, name="Mallory")


@pytest.fixture
def mallorys_team(mallory_user: User) -> Team:
    return create_team(name="Mallory's team", owner=mallory_user)


@pytest.fixture
def alices_key(alices_team: Team, alice_user: User) -> tuple[ApiKey, str]:
    """Alice's key, for an admin and a developer, and its secret."""
    return make_key(alices_team, alice_user, Role.ADMIN, Role.DEVELOPER)


@pytest.fixture
def alice(alices_key: tuple[ApiKey, str]) -> APIClient:
    return client_with(alices_key[1])


@pytest.fixture
def bob(alices_team: Team, bob_user: User) -> APIClient:
    return client_with(make_key(alices_team, bob_user, Role.VIEWER)[1])


@pytest.fixture
def mallory(mallorys_team: Team, mallory_user: User) -> APIClient:
    return client_with(make_key(mallorys_team, mallory_user, Role.ADMIN, Role.DEVELOPER)[1])


@pytest.fixture
def nobody() -> APIClient:
    """A client without a key."""
    return APIClient()


@pytest.fixture
def alices_browser(alice_user: User, alices_team: Team) -> Client:
    return signed_in(alice_user)


@pytest.fixture
def bobs_browser(bob_user: User) -> Client:
    return signed_in(bob_user)


@pytest.fixture
def mallorys_browser(mallory_user: User, mallorys_team: Team) -> Client:
    return signed_in(mallory_user)


def make_key(team: Team, user: User, *roles: Role) -> tuple[ApiKey, str]:
    """Make a key with these roles; returns it with its secret."""
    return create_api_key(
        team=team, created_by=user, held_roles=[Role.ADMIN], name="test", roles=roles
    )


def client_with(secret: str) -> APIClient:
    """Return an API client that sends this key."""
    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {secret}")
    return client


def signed_in(user: User) -> Client:
    """Return a browser in which the user has signed in."""
    client = Client()
    client.force_login(user)
    return client
