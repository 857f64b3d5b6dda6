"""The cache's connections."""

import threading

from django.core.cache import caches


def test_requests_share_the_connections_of_their_process() -> None:
    one, other = caches.create_connection("default"), caches.create_connection("default")

    assert one is not other
    assert one._cache is other._cache  # type: ignore[attr-defined]


def test_many_threads_may_use_it_at_once() -> None:
    failures: list[BaseException] = []

    def count(number: int) -> None:
        try:
            cache = caches.create_connection("default")
            for turn in range(50):
                cache.set(f"shared-{number}", turn)
                assert cache.get(f"shared-{number}") == turn
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=count, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
