"""Run this host's gate until it is told to end."""

import asyncio
import logging
from ipaddress import IPv4Network
from pathlib import Path

from django.conf import settings
from django.core.management.base import BaseCommand

from hosts.gate import GateConfig, serve


class Command(BaseCommand):
    help = "Run the host's SSH gate (as root, in the foreground; ends cleanly on SIGTERM)."

    def handle(self, *args: object, **options: object) -> None:
        # asyncssh tells of every connection and channel at INFO: too much, and not ours.
        logging.getLogger("asyncssh").setLevel(logging.WARNING)
        asyncio.run(
            serve(
                GateConfig(
                    host=settings.GATE_HOST,
                    port=settings.GATE_PORT,
                    key_file=Path(settings.GATE_KEY_FILE),
                    platform_public_key=settings.PLATFORM_PUBLIC_KEY,
                    guest_subnet=IPv4Network(settings.GUEST_SUBNET),
                    files_dir=Path(settings.RUN_DIR) / "files",
                    images_dir=Path(settings.RUN_DIR) / "images",
                )
            )
        )
