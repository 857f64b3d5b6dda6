"""`manage.py collect`: deletes what no generation needs, now; the scheduler does it, too."""

from argparse import ArgumentParser
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand

from hosts.collection import collect, sweep_orphans


class Command(BaseCommand):
    help = "Collect what no generation needs. To be run on a host: it has the keys."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--orphans",
            action="store_true",
            help="list the whole store for objects that no row knows instead",
        )

    def handle(self, *args: Any, orphans: bool, **options: Any) -> None:
        done = sweep_orphans() if orphans else collect()
        if done is None:
            self.stdout.write("Another collector is at work.")
            return
        for name, amount in asdict(done).items():
            self.stdout.write(f"{name}: {amount}")
