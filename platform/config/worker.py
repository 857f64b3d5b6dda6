"""What `dramatiq config.worker` loads: Django, the broker, then every actor."""

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")

import django

django.setup()

from django.conf import settings

from common.queue import broker

import sandboxes.actors
from sandboxes.background import KeeperMiddleware

# A worker consumes the queues that are declared; no actor is bound to this one by name.
broker.declare_queue(f"host.{settings.HOST_NAME}")
broker.add_middleware(KeeperMiddleware())

__all__ = ["broker", "sandboxes"]
