"""Say that a host is lost: its sandboxes go on elsewhere from what was stored last."""

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from hosts.models import Host
from sandboxes.host_loss import leave_host


class Command(BaseCommand):
    """`manage.py leave_host NAME`."""

    help = "Take all sandboxes from a host that is lost. What it had not stored is lost, too."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name")

    def handle(self, *args: Any, name: str, **options: Any) -> None:
        host = Host.objects.filter(name=name).first()
        if host is None:
            raise CommandError(f"There is no host {name}.")
        if host.is_alive:
            raise CommandError(f"Host {name} is heard of; close it and pause what it runs.")
        moved = 0
        while batch := leave_host(host):
            moved += batch
        left = host.sandboxes.count()
        self.stdout.write(f"{moved} sandboxes left {name}; {left} found no room elsewhere.")
