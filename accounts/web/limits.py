"""How long a rate limit of the account pages still lasts."""

import math
import time

from allauth.core.internal import ratelimit
from django.core.cache import cache
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import Resolver404, resolve

ACTIONS = {
    "account_login": "login",
    "account_signup": "signup",
    "account_reset_password": "reset_password",
    "account_email": "confirm_email",
}
# Where it cannot be told: the longest period of the limits that are counted by address.
UNKNOWN_WAIT_S = 60


def wait_s(request: HttpRequest, action: str, key: str | None = None) -> int:
    """Return after how many seconds the action is allowed again, at least 1."""
    waits = [
        _wait_for(request, action, rate, key)
        for rate in ratelimit.get_rates(app="allauth.account", action=action)
        if rate.per == "ip" or (rate.per == "key" and key is not None)
    ]
    return math.ceil(max([*waits, 0])) or UNKNOWN_WAIT_S


def _wait_for(
    request: HttpRequest, action: str, rate: ratelimit.Rate, key: str | None
) -> float:
    name = ratelimit.get_cache_key(
        request, app="allauth.account", action=action, rate=rate, key=key
    )
    history: list[float] = cache.get(name, [])  # newest first
    if len(history) < rate.amount:
        return 0
    oldest_that_counts = history[rate.amount - 1]
    return float(oldest_that_counts + rate.duration - time.time())


def in_words(seconds: int) -> str:
    """Return a short time as people say it."""
    if seconds < 90:  # noqa: PLR2004
        return f"{seconds} second{'' if seconds == 1 else 's'}"
    return f"{math.ceil(seconds / 60)} minutes"


def too_many_requests(request: HttpRequest) -> HttpResponse:
    """Answer 429, and say when to try again."""
    try:
        action = ACTIONS.get(resolve(request.path_info).url_name or "", "")
    except Resolver404:
        action = ""
    pause_s = wait_s(request, action) if action else UNKNOWN_WAIT_S
    context = {"pause": in_words(pause_s)}
    response = render(request, "429.html", context, status=429)
    response["Retry-After"] = str(pause_s)
    return response
