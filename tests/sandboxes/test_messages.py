"""How long messages to hosts are worth something."""

import time
from contextlib import suppress
from datetime import timedelta

import pytest
from dramatiq.broker import MessageProxy
from dramatiq.middleware import SkipMessage
from dramatiq.middleware.age_limit import AgeLimit

from common.queue import broker
from sandboxes import actors
from sandboxes.sweep import HINTS


@pytest.mark.parametrize("actor", sorted(set(HINTS.values()), key=str))
def test_what_is_asked_for_again_and_again_does_not_pile_up(actor: actors.HostActor) -> None:
    def is_dropped(age: timedelta) -> bool:
        sent_ms = int((time.time() - age.total_seconds()) * 1000)
        message = actor.message("rs-c1-default-abcde").copy(message_timestamp=sent_ms)
        proxy = MessageProxy(message)
        with suppress(SkipMessage):
            AgeLimit().before_process_message(broker, proxy)  # type: ignore[no-untyped-call]
        return bool(proxy.failed)

    # Newer ones have been sent since.
    assert is_dropped(timedelta(minutes=3))
    # A boot that was under way kept it waiting; nothing newer is surely there.
    assert not is_dropped(timedelta(seconds=60))
