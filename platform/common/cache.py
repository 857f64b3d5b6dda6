"""Django's Redis cache, its connections shared by all requests of a process.

Django makes a cache object for each request of an ASGI site, and with Redis each of them
connects anew: that takes longer than what is then asked.
"""

from functools import cache
from typing import Any

from django.core.cache.backends.redis import RedisCache, RedisCacheClient
from django.utils.functional import cached_property


class SharedRedisCache(RedisCache):
    """A cache whose client is the process's one for its servers; takes no OPTIONS."""

    @cached_property
    def _cache(self) -> Any:
        return _client(tuple(self._servers))  # type: ignore[attr-defined]


@cache
def _client(servers: tuple[str, ...]) -> RedisCacheClient:
    return RedisCacheClient(list(servers))
