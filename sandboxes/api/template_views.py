"""Templates: what sandboxes start from."""

from django.db.models import F
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.api.views import TeamView
from common.api.envelope import ok
from sandboxes.api import schema
from sandboxes.api.bodies import template_body
from sandboxes.errors import TemplateNotFound
from sandboxes.models import Template


class TemplateList(TeamView):
    """`/templates`: the public ones and the team's own."""

    required_permission = {"GET": "template:read"}  # noqa: RUF012

    @extend_schema(
        summary="List templates",
        responses={200: schema.enveloped("TemplateList", schema.TemplateList())}
        | schema.refusals(403),
    )
    def get(self, request: Request) -> Response:
        found = Template.objects.visible_to(self.team).order_by("template_id", "team_id")
        templates = [template_body(template) for template in found]
        return ok({"templates": templates, "count": len(templates)})


class TemplateDetail(TeamView):
    """`/templates/<id>`: the team's own, or else the public one of this id."""

    required_permission = {"GET": "template:read"}  # noqa: RUF012

    @extend_schema(
        summary="Show a template",
        responses={200: schema.enveloped("Template", schema.TemplateAnswer())}
        | schema.refusals(403, 404),
    )
    def get(self, request: Request, template_id: str) -> Response:
        if "\0" in template_id:
            raise TemplateNotFound(template_id)
        found = (
            Template.objects.visible_to(self.team)
            .filter(template_id=template_id.lower())
            .order_by(F("team_id").asc(nulls_last=True))
            .first()
        )
        if found is None:
            raise TemplateNotFound(template_id)
        return ok(template_body(found))
