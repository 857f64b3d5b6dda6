"""How open connections hear that their key was closed: a hint over Redis, and the row."""

import asyncio
import logging
from functools import partial
from uuid import UUID

from asgiref.sync import async_to_sync
from channels.layers import get_channel_layer
from django.db import DatabaseError, transaction
from django.utils import timezone
from redis.exceptions import RedisError

from accounts.models import ApiKey
from common.api.database import run_db

log = logging.getLogger(__name__)

# The hint comes at once; this finds a key whose hint was lost, or that has expired.
LOOK_EVERY_S = 30


def key_group(key_id: UUID) -> str:
    """Return the channel group that hears of one key."""
    return f"key.{key_id}"


def announce_closed(key: ApiKey) -> None:
    """Tell open connections of the key to end, once the transaction has committed."""
    transaction.on_commit(partial(_send, key.pk))


def _send(key_id: UUID) -> None:
    layer = get_channel_layer()
    assert layer is not None
    try:
        async_to_sync(layer.group_send)(key_group(key_id), {"type": "key.closed"})
    except (OSError, RedisError) as error:
        log.warning("could not announce that key %s is closed: %s", key_id, error)


async def until_closed(key: ApiKey) -> None:
    """Wait until the key opens nothing any more."""
    while True:
        try:
            await _hint(key)
            if not await run_db(_is_usable, key):
                return
        except (OSError, RedisError, DatabaseError) as error:
            # Not being able to look is no reason to end what runs.
            log.warning("cannot look after key %s: %s", key.pk, error)
            await asyncio.sleep(LOOK_EVERY_S)


async def _hint(key: ApiKey) -> None:
    """Return at a hint about the key, or when it is time to look at the row."""
    layer = get_channel_layer()
    assert layer is not None
    channel = await layer.new_channel()
    await layer.group_add(key_group(key.pk), channel)
    try:
        # It may have been closed before we listened.
        if await run_db(_is_usable, key):
            await asyncio.wait_for(layer.receive(channel), LOOK_EVERY_S)
    except TimeoutError:
        return
    finally:
        await layer.group_discard(key_group(key.pk), channel)


def _is_usable(key: ApiKey) -> bool:
    usable = ApiKey.objects.usable(timezone.now())
    return usable.filter(pk=key.pk, created_by__is_active=True).exists()
