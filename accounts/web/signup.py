"""Sign-up, all or nothing."""

from allauth.account import views as allauth_views
from django.db import IntegrityError, transaction
from django.http import HttpRequest
from django.http.response import HttpResponseBase


def signup(request: HttpRequest) -> HttpResponseBase:
    """Make user, address and first team in one transaction.

    Of two sign-ups with one address at once the later finds the row taken; asked again, it
    answers as for any address that is in use.
    """
    try:
        return _signup(request)
    except IntegrityError:
        return _signup(request)


def _signup(request: HttpRequest) -> HttpResponseBase:
    with transaction.atomic():
        response: HttpResponseBase = allauth_views.signup(request)
    return response
