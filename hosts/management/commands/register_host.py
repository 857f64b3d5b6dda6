"""`manage.py register_host`: makes this machine known as a host, or updates its row."""

import os
from ipaddress import IPv4Network
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser

from common.units import GiB, MiB
from hosts import local
from hosts.fuse_setup import allow_other, open_device
from hosts.models import Host
from hosts.network import NetworkConfig, ensure_network

# What the machine itself, its services and the page cache need.
KEPT_FOR_HOST_BYTES = 3 * GiB


class Command(BaseCommand):
    help = "Register this machine as a host, and set it up for guests. Run as root."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--memory-mib", type=int, help="what it may promise to guests (default: most)"
        )

    def handle(self, *args: Any, memory_mib: int | None = None, **options: Any) -> None:
        total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory_bytes = (
            memory_mib * MiB
            if memory_mib
            else max(total_bytes - KEPT_FOR_HOST_BYTES, total_bytes // 2)
        )
        host, is_new = Host.objects.update_or_create(
            name=settings.HOST_NAME,
            defaults={
                "gate_host": settings.GATE_HOST,
                "gate_port": settings.GATE_PORT,
                "gate_public_key": settings.GATE_PUBLIC_KEY,
                "subnet": settings.GUEST_SUBNET,
                "memory_bytes": memory_bytes,
                "cpu_count": os.cpu_count() or 1,
                "accelerator": local.accelerator(),
            },
        )
        ensure_network(
            NetworkConfig(
                name=settings.GUEST_NETWORK,
                bridge=settings.GUEST_BRIDGE,
                subnet=IPv4Network(settings.GUEST_SUBNET),
            ),
            uri=settings.LIBVIRT_URI,
        )
        open_device()
        allow_other()
        verb = "registered" if is_new else "brought up to date"
        self.stdout.write(
            f"{verb} host {host.name}: {memory_bytes / GiB:.1f} GiB, {host.accelerator}"
        )
