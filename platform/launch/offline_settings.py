"""The settings for checks that read code alone, so that they need no server."""

from config.settings import *  # noqa: F403

# `makemigrations --check` would ask the database which migrations it has.
DATABASES = {"default": {"ENGINE": "django.db.backends.dummy"}}
