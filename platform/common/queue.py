"""The one message broker that every actor is bound to."""

import logging
from typing import Any

import dramatiq
import redis
from django import db
from django.conf import settings
from dramatiq.brokers.redis import RedisBroker, _RedisConsumer
from dramatiq.brokers.stub import StubBroker
from dramatiq.common import dq_name
from dramatiq.errors import ConnectionClosed
from dramatiq.middleware import Middleware

log = logging.getLogger(__name__)

FULL_WAIT_S = 0.05
"""How long a consumer waits that has messages in hand, which it must see to by itself."""
MAX_IDLE_S = 2.0
"""Below the limit that a client's socket has by itself, and a heartbeat's length."""
BELL_KEPT_S = 60


class PromptConsumer(_RedisConsumer):
    """Waits for the bell of its queue where dramatiq's own sleeps, for up to a second."""

    def __init__(
        self, broker: "PromptRedisBroker", queue_name: str, prefetch: int, timeout: int
    ) -> None:
        # What it finds nothing for it comes back from at once.
        super().__init__(broker, queue_name, prefetch, timeout=0)  # type: ignore[no-untyped-call]
        self._is_for_delayed = dq_name(queue_name) == queue_name
        self._idle_s = min(max(timeout / 1000, FULL_WAIT_S), MAX_IDLE_S)

    def __next__(self) -> Any:
        # Before it looks: one that had to pass a message over must not wait for its bell.
        wait_s = FULL_WAIT_S if self._is_busy() else self._idle_s
        message = super().__next__()  # type: ignore[no-untyped-call]
        if message is None:
            self._wait(wait_s)
        return message

    def _is_busy(self) -> bool:
        in_hand = self.outstanding_message_count
        return in_hand >= self.prefetch or (in_hand > 0 and self._is_for_delayed)

    def _wait(self, wait_s: float) -> None:
        try:
            self.broker.client.blpop([self.broker.bell(self.queue_name)], timeout=wait_s)
        except redis.TimeoutError:
            return  # a socket's own limit was shorter, or Redis stalls: the next look tells
        except redis.ConnectionError as error:
            raise ConnectionClosed(error) from None  # type: ignore[no-untyped-call]


class PromptRedisBroker(RedisBroker):
    """Rings a bell with each message, so that an idle worker takes it up in a millisecond.

    The bell is a list of one item beside the queue. A lost ring costs a second, no message.
    """

    @property
    def consumer_class(self) -> type[PromptConsumer]:
        """What waits for the bell."""
        return PromptConsumer

    def bell(self, queue_name: str) -> str:
        """Return the key that is pushed to when a message comes to the queue."""
        return f"{self.namespace}:{queue_name}.bell"

    def do_enqueue(self, queue_name: str, *args: Any) -> Any:
        """Enqueue, then ring."""
        result = self._dispatch("enqueue")(queue_name, *args)  # type: ignore[no-untyped-call]
        self._ring(queue_name)
        return result

    def _ring(self, queue_name: str) -> None:
        bell = self.bell(queue_name)
        try:
            with self.client.pipeline(transaction=True) as pipeline:
                pipeline.rpush(bell, 1)
                pipeline.ltrim(bell, -1, -1)
                pipeline.expire(bell, BELL_KEPT_S)
                pipeline.execute()
        except redis.RedisError as error:
            log.warning("the bell of queue %s was not rung: %s", queue_name, error)


class DatabaseConnections(Middleware):
    """Drops connections that the server closed while a worker thread sat idle."""

    def _close_old(self, *args: Any, **kwargs: Any) -> None:
        db.close_old_connections()

    before_process_message = _close_old
    after_process_message = _close_old


def _make_broker(url: str) -> dramatiq.Broker:
    broker: dramatiq.Broker
    if url == "stub":
        broker = StubBroker()
    elif url.startswith("amqp"):
        from dramatiq.brokers.rabbitmq import RabbitmqBroker  # noqa: PLC0415  (an extra)

        broker = RabbitmqBroker(url=url)
    else:
        # A killed worker's messages come back after the heartbeat timeout, and only when
        # maintenance runs, which by default a quiet queue never sees.
        broker = PromptRedisBroker(  # type: ignore[no-untyped-call]
            url=url, heartbeat_timeout=10_000, maintenance_chance=1_000_000
        )
    broker.add_middleware(DatabaseConnections())
    return broker


broker = _make_broker(settings.QUEUE_URL)
dramatiq.set_broker(broker)


def send_to(queue_name: str, actor: dramatiq.Actor[Any, Any], *args: object) -> None:
    """Send a message of the actor to a queue chosen now, such as one host's."""
    broker.declare_queue(queue_name)
    broker.enqueue(actor.message_with_options(args=args).copy(queue_name=queue_name))
