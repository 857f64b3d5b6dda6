"""What the console's views have in common: whose sandbox it is, and how a refusal shows."""

import json
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec

from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect, resolve_url

from accounts.web.access import TeamRequest
from common.errors import DomainError
from sandboxes.access import SANDBOX_ID
from sandboxes.models import Sandbox

P = ParamSpec("P")


class SandboxDeleted(Http404):
    """Its page is gone, like that of a sandbox which never was."""


def is_partial(request: HttpRequest) -> bool:
    """Say whether a part of a page asks, and not the browser for a page."""
    return request.headers.get("HX-Request") == "true"


def sandbox_or_404(request: TeamRequest, sandbox_id: str) -> Sandbox:
    """Return the team's sandbox with all that its pages show.

    Raises:
        SandboxDeleted: there was one of this id.
        Http404: the id is malformed, unknown, or another team's.
    """
    sandboxes = Sandbox.objects.of(request.team)
    related = ("host", "team", "template", "parent", "volume__head", "volume__attached_host")
    found = None
    if SANDBOX_ID.fullmatch(sandbox_id):
        found = sandboxes.select_related(*related).filter(pk=sandbox_id).first()
    if found is None:
        raise Http404("No such sandbox.")
    if found.state == Sandbox.State.DELETED:
        raise SandboxDeleted("This sandbox was deleted.")
    return found


def toast(response: HttpResponse, text: str) -> HttpResponse:
    """Have the page say something in passing."""
    response["HX-Trigger"] = json.dumps({"toast": {"text": text}})
    return response


def leave_to(request: HttpRequest, to: str, *args: object) -> HttpResponse:
    """Send the reader to another page, whether a page or a part of one asked."""
    if is_partial(request):
        return HttpResponse(headers={"HX-Redirect": resolve_url(to, *args)})
    return redirect(to, *args)


def refusal(error: DomainError) -> HttpResponse:
    """Say why not; the page's script shows it."""
    return HttpResponse(
        str(error), status=error.status, content_type="text/plain; charset=utf-8"
    )


def shows_refusals(
    view: Callable[Concatenate[TeamRequest, P], HttpResponseBase],
) -> Callable[Concatenate[TeamRequest, P], HttpResponseBase]:
    """Answer a domain error of the view in words, with its status."""

    @wraps(view)
    def guarded(request: TeamRequest, /, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
        try:
            return view(request, *args, **kwargs)
        except DomainError as error:
            return refusal(error)

    return guarded
