"""Make an API key from the command line, and whatever it needs."""

from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.core.validators import validate_email
from django.db import transaction

from accounts.models import Membership, Role, Team, User
from accounts.services import DEFAULT_LIFETIME, LIFETIMES, create_api_key, create_team


class Command(BaseCommand):
    help = "Make an API key, with its user and team if they are missing; print it alone."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--email", required=True, help="who makes the key")
        parser.add_argument("--team", required=True, help="the name of one of their teams")
        parser.add_argument("--role", choices=Role.values, default=Role.DEVELOPER.value)
        parser.add_argument("--name", default="command line")
        parser.add_argument("--expires-in", choices=list(LIFETIMES), default=DEFAULT_LIFETIME)

    @transaction.atomic
    def handle(self, *args: Any, **options: Any) -> None:
        user = _user(options["email"])
        team = _team(user, options["team"])
        _, secret = create_api_key(
            team=team,
            created_by=user,
            held_roles=[Role.ADMIN],  # whoever runs this holds the database
            name=options["name"],
            roles=[options["role"]],
            expires_in=options["expires_in"],
        )
        self.stdout.write(secret)


def _user(email: str) -> User:
    try:
        validate_email(email)
    except ValidationError:
        raise CommandError(f"{email!r} is not an e-mail address.") from None
    found = User.objects.filter(email__iexact=email).first()
    # Without a password: whoever reads that address's mail sets one by "forgot password".
    return found or User.objects.create_user(email, name=email.partition("@")[0])


def _team(user: User, name: str) -> Team:
    membership = Membership.objects.filter(user=user, team__name=name).first()
    return membership.team if membership else create_team(name=name, owner=user)
