"""Forms of the account pages and the keys page."""

from django import forms
from django.http import HttpRequest

from accounts.models import Role, User
from accounts.services import DEFAULT_LIFETIME, create_first_team

LIFETIME_CHOICES = [
    ("30d", "30 days"),
    ("90d", "90 days"),
    ("180d", "180 days"),
    ("365d", "1 year"),
    ("never", "never"),
]


class SignupDetails(forms.Form):
    """What sign-up asks beside e-mail and password; allauth builds its form on this one."""

    name = forms.CharField(
        max_length=120,
        label="Your name",
        widget=forms.TextInput(attrs={"autocomplete": "name"}),
    )
    field_order = ("name", "email", "password1")

    def signup(self, request: HttpRequest, user: User) -> None:
        """Complete a new user, in the transaction that made it."""
        user.name = self.cleaned_data["name"]
        user.save(update_fields=["name", "updated_at"])
        create_first_team(user)


class NewKey(forms.Form):
    """The dialog that makes an API key."""

    name = forms.CharField(max_length=80, label="Name")
    role = forms.ChoiceField(choices=Role.choices, initial=Role.DEVELOPER)
    expires_in = forms.ChoiceField(
        choices=LIFETIME_CHOICES, initial=DEFAULT_LIFETIME, label="Expires after"
    )


class TeamChoice(forms.Form):
    """The team switcher."""

    team = forms.UUIDField()
