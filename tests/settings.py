"""The settings that the tests run with: real PostgreSQL and Redis, no queue to a worker."""

import os

os.environ.setdefault("DEBUG", "true")
os.environ["QUEUE_URL"] = "stub"

from config.settings import *  # noqa: F403

DEBUG = False
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
EMAIL_BACKEND = "django.core.mail.backends.locmem.EmailBackend"
# Look static files up when asked: a scan of them all for every test client is slow.
WHITENOISE_AUTOREFRESH = True
