"""How allauth signs users up and in for us."""

from typing import Any

from allauth.account.adapter import DefaultAccountAdapter
from allauth.core.internal import ratelimit
from django.contrib.sites.shortcuts import get_current_site
from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import HttpRequest

from accounts.models import User
from accounts.services import create_first_team, record_event
from accounts.web.limits import in_words, wait_s


class AccountAdapter(DefaultAccountAdapter):  # type: ignore[misc]
    """allauth's own, where a limit says how long it lasts and each sign-in is recorded."""

    def send_mail(self, template_prefix: str, email: str, context: dict[str, Any]) -> None:
        """Send after the commit: no mail for a user who was not made after all.

        A mail server that is down is logged and is no reason to fail: each mail can be
        asked for again.
        """
        site = {"request": self.request, "current_site": get_current_site(self.request)}
        message = self.render_mail(template_prefix, email, {"email": email} | site | context)
        transaction.on_commit(message.send, robust=True)

    def format_email_subject(self, subject: str) -> str:
        return f"Sandkeep: {subject}"

    def login(self, request: HttpRequest, user: User) -> None:
        # Here for everyone who has none: made by an operator, or by a sign-up cut short.
        team = create_first_team(user)
        super().login(request, user)
        record_event(
            team=team,
            user=user,
            action="user.sign_in",
            resource_type="user",
            resource_id=str(user.pk),
            source_ip=request.META.get("REMOTE_ADDR"),
        )

    def pre_authenticate(self, request: HttpRequest, **credentials: Any) -> None:
        """Count the attempt; over the limit, say when to try again."""
        key = self._get_login_attempts_cache_key(request, **credentials)
        self._login_failed_rl_usage = ratelimit.consume(
            request, app="allauth.account", action="login_failed", key=key
        )
        if not self._login_failed_rl_usage:
            pause = in_words(wait_s(request, "login_failed", key))
            raise ValidationError(
                f"Too many attempts to sign in have failed. Try again in {pause}.",
                code="too_many_login_attempts",
            )
