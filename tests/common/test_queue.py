"""The queue: who waits for a message has it as soon as it is there. Against a real Redis."""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import dramatiq
import pytest
import redis
from django.conf import settings
from dramatiq.brokers.redis import _RedisConsumer
from dramatiq.common import current_millis
from dramatiq.errors import ConnectionClosed

from common import queue
from common.queue import PromptRedisBroker

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG_MS = 4_000
"""A wait that is seen if it is waited out: no bound on how long anything takes."""


@pytest.fixture(autouse=True)
def long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MAX_IDLE_S", LONG_MS / 1000)


@pytest.fixture
def broker() -> Iterator[PromptRedisBroker]:
    broker = PromptRedisBroker(  # type: ignore[no-untyped-call]
        url=settings.REDIS_URL, namespace=f"test-{os.urandom(4).hex()}", middleware=[]
    )
    broker.declare_queue("work")
    yield broker
    for key in broker.client.scan_iter(f"{broker.namespace}:*"):
        broker.client.delete(key)
    broker.close()


def message(text: str = "hello") -> dramatiq.Message[Any]:
    return dramatiq.Message(
        queue_name="work", actor_name="say", args=(text,), kwargs={}, options={}
    )


def later(do: Any, *args: Any, after_s: float = 0.2, **kwargs: Any) -> threading.Timer:
    timer = threading.Timer(after_s, do, args, kwargs)
    timer.start()
    return timer


def taken(consumer: Any) -> dramatiq.MessageProxy:
    message = next(consumer)
    assert message is not None
    return cast("dramatiq.MessageProxy", message)


def failing(error: type[Exception]) -> Any:
    """Stand in for a command of a Redis that goes away."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    return fail


def empty_handed(consumer: Any) -> int:
    """Take what there is; return how often nothing came before it."""
    count = 0
    while next(consumer) is None:
        count += 1
    return count


@contextmanager
def no_long_wait() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < LONG_MS / 1000 / 2


def test_a_waiting_consumer_has_a_message_when_it_comes(broker: PromptRedisBroker) -> None:
    consumer = broker.consume("work", timeout=LONG_MS)

    later(broker.enqueue, message())
    with no_long_wait():
        waits = empty_handed(consumer)

    assert waits <= 1


def test_one_that_came_just_before_the_wait_is_not_waited_for(
    broker: PromptRedisBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = broker.consume("work", timeout=LONG_MS)
    fetch = broker._dispatch("fetch")  # type: ignore[no-untyped-call]

    def fetch_then_late(*args: Any) -> Any:
        found = fetch(*args)
        if not found:
            broker.enqueue(message())
        return found

    monkeypatch.setattr(broker, "do_fetch", fetch_then_late, raising=False)

    with no_long_wait():
        assert next(consumer) is None  # the bell was rung already
        assert taken(consumer).args == ("hello",)


def test_the_bell_of_many_messages_rings_once(broker: PromptRedisBroker) -> None:
    for _ in range(100):
        broker.enqueue(message())

    assert broker.client.llen(broker.bell("work")) == 1
    assert 0 < broker.client.ttl(broker.bell("work")) <= 60


def test_a_message_whose_bell_was_not_rung_is_had_at_the_next_look(
    broker: PromptRedisBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker.client, "pipeline", failing(redis.ConnectionError))
    consumer = broker.consume("work", timeout=100)

    broker.enqueue(message())

    assert taken(consumer).args == ("hello",)


def test_a_consumer_with_all_it_may_hold_takes_more_when_it_has_done_with_one(
    broker: PromptRedisBroker,
) -> None:
    consumer = broker.consume("work", prefetch=1, timeout=LONG_MS)
    broker.enqueue(message("one"))
    broker.enqueue(message("two"))
    one = taken(consumer)

    with no_long_wait():
        later(consumer.ack, one)
        empty_handed(consumer)


def test_one_that_is_done_with_while_the_consumer_looks_is_made_up_for_at_once(
    broker: PromptRedisBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = broker.consume("work", prefetch=1, timeout=LONG_MS)
    broker.enqueue(message("one"))
    one = taken(consumer)
    broker.enqueue(message("two"))
    next(consumer)  # hears the bell of the second, and may not take it
    look = _RedisConsumer.__next__

    def look_while_the_first_is_acknowledged(self: Any) -> Any:
        found = look(self)  # type: ignore[no-untyped-call]
        if one.message_id in self.queued_message_ids:
            self.ack(one)
        return found

    monkeypatch.setattr(_RedisConsumer, "__next__", look_while_the_first_is_acknowledged)

    with no_long_wait():
        empty_handed(consumer)


def test_a_wait_that_a_socket_ends_earlier_is_no_failure(
    broker: PromptRedisBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = broker.consume("work", timeout=LONG_MS)

    monkeypatch.setattr(broker.client, "blpop", failing(redis.TimeoutError))

    assert next(consumer) is None
    broker.enqueue(message())
    assert taken(consumer).args == ("hello",)


def test_delayed_messages_in_hand_are_seen_to_in_time(broker: PromptRedisBroker) -> None:
    consumer = broker.consume("work.DQ", prefetch=10, timeout=LONG_MS)
    broker.enqueue(message(), delay=300)
    delayed = taken(consumer)

    # Its thread must come back by itself to notice that the time has come.
    while current_millis() < delayed.options["eta"]:
        assert next(consumer) is None

    assert current_millis() - delayed.options["eta"] < LONG_MS / 4


def test_a_wait_that_redis_breaks_off_is_said_as_dramatiq_knows_it(
    broker: PromptRedisBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = broker.consume("work", timeout=LONG_MS)

    monkeypatch.setattr(broker.client, "blpop", failing(redis.ConnectionError))

    with pytest.raises(ConnectionClosed):
        next(consumer)


def test_a_worker_takes_a_message_up_at_once(broker: PromptRedisBroker) -> None:
    done = threading.Event()

    @dramatiq.actor(queue_name="work", broker=broker)
    def say(text: str) -> None:
        done.set()

    worker = dramatiq.Worker(broker, worker_timeout=LONG_MS, worker_threads=1)
    worker.start()
    try:
        time.sleep(0.3)
        say.send("hello")
        assert done.wait(LONG_MS / 1000 / 2)
    finally:
        for queue_name in ("work", "work.DQ"):  # or the end would be waited for
            later(broker._ring, queue_name)
        worker.stop(timeout=LONG_MS)
