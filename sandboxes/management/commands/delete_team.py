"""`manage.py delete_team`: deletes all that a team has, and destroys its key."""

from argparse import ArgumentParser
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError

from accounts.models import Team
from sandboxes.teams import end_team


class Command(BaseCommand):
    help = "Delete all that a team has. Its key is destroyed: nothing can be brought back."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("team", type=UUID, help="the team's id")
        parser.add_argument("--name", required=True, help="its name, to be sure")

    def handle(self, *args: Any, team: UUID, name: str, **options: Any) -> None:
        found = Team.objects.filter(pk=team).first()
        if found is None or found.name != name:
            raise CommandError("There is no team of this id and name.")
        end_team(found)
        self.stdout.write(f"All of {found.name} is deleted, and its key is destroyed.")
