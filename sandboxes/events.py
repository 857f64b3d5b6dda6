"""How a change of a sandbox reaches those who wait for it: hints, over Redis.

The row is the truth. A hint may be lost, so whoever waits also looks at the row now and
then; `Changes.wait` returns at the next hint or when its time is up, whichever is first.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from uuid import UUID

from asgiref.sync import async_to_sync
from channels.layers import get_channel_layer
from django.db import transaction
from redis.exceptions import RedisError

from sandboxes.models import Sandbox

log = logging.getLogger(__name__)


def sandbox_group(sandbox_id: str) -> str:
    """Return the channel group that hears of one sandbox."""
    return f"sandbox.{sandbox_id}"


def team_group(team_id: UUID) -> str:
    """Return the channel group that hears of a team's sandboxes."""
    return f"team.{team_id}"


def announce(sandbox: Sandbox) -> None:
    """Tell those who watch that the sandbox changed, once the transaction has committed."""
    transaction.on_commit(partial(_send, sandbox.id, sandbox.team_id))


def _send(sandbox_id: str, team_id: UUID) -> None:
    message = {"type": "sandbox.changed", "sandbox_id": sandbox_id}
    try:
        async_to_sync(_send_to_groups)(message, sandbox_group(sandbox_id), team_group(team_id))
    except (OSError, RedisError) as error:
        # Redis is away. Watchers look at the row by themselves.
        log.warning("could not announce a change of %s: %s", sandbox_id, error)


async def _send_to_groups(message: dict[str, Any], *groups: str) -> None:
    layer = get_channel_layer()
    assert layer is not None
    for group in groups:
        await layer.group_send(group, message)


class Changes:
    """A subscription to one sandbox's changes."""

    def __init__(self, layer: Any, channel: str) -> None:
        self._layer = layer
        self._channel = channel

    async def wait(self, timeout_s: float) -> bool:
        """Return True at the next change, or False when the time is up."""
        try:
            await asyncio.wait_for(self._layer.receive(self._channel), timeout_s)
        except TimeoutError:
            return False
        return True


@asynccontextmanager
async def watching(sandbox_id: str) -> AsyncIterator[Changes]:
    """Subscribe to a sandbox's changes. Look at the row after entering, not before."""
    layer = get_channel_layer()
    assert layer is not None
    channel = await layer.new_channel()
    group = sandbox_group(sandbox_id)
    await layer.group_add(group, channel)
    try:
        yield Changes(layer, channel)
    finally:
        await layer.group_discard(group, channel)
