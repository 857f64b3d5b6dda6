"""The settings that the tests run with: real PostgreSQL and Redis, no queue to a worker."""

import os

from tests.workers import WORKER, redis_url

os.environ.setdefault("DEBUG", "true")
os.environ["QUEUE_URL"] = "stub"
os.environ["REDIS_URL"] = redis_url(os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/1"))

from config.settings import *  # noqa: F403
from config.settings import REDIS_URL

DEBUG = False
MASTER_KEY = "c2FuZGtlZXAgdGVzdHMsIDMyIGJ5dGVzLCBubyBrZXk="
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
EMAIL_BACKEND = "django.core.mail.backends.locmem.EmailBackend"
# Look static files up when asked: a scan of them all for every test client is slow.
WHITENOISE_AUTOREFRESH = True
CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
        # Redis delivers past its numbers, to whoever listens to a channel of that name.
        "CONFIG": {"hosts": [REDIS_URL], "prefix": f"test{WORKER}"},
    }
}
