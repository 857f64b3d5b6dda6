"""`manage.py run_scheduler`: sweeps once a second, until it is told to stop."""

import logging
import signal
import threading
from typing import Any

from django import db
from django.core.management.base import BaseCommand
from django.db import OperationalError, connection
from redis.exceptions import RedisError

from sandboxes.sweep import Sweeper

log = logging.getLogger(__name__)

SWEEP_EVERY_S = 1.0
# Of the one scheduler that sweeps; a second one waits for the first to end.
LOCK_ID = 0x5A4D_4B45_4550


class Command(BaseCommand):
    help = "Pause and delete what has expired, and repeat hints that were lost."

    def handle(self, *args: Any, **options: Any) -> None:
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        sweeper = Sweeper()
        while not stop.is_set():
            try:
                if _is_ours():
                    sweeper.sweep()
            except (OperationalError, RedisError, OSError):
                # The lock is gone with its connection: it is taken again with the next.
                log.exception("a sweep failed; the next one follows")
                db.close_old_connections()
            stop.wait(SWEEP_EVERY_S)


def _is_ours() -> bool:
    """Take or keep the lock that makes this the one scheduler.

    Re-entrant for this session, and let go by the server when the session ends.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT CASE WHEN EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory'"
            " AND pid = pg_backend_pid() AND granted) THEN true"
            " ELSE pg_try_advisory_lock(%s) END",
            [LOCK_ID],
        )
        return bool(cursor.fetchone()[0])
