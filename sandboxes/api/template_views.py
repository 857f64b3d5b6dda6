"""Templates: what sandboxes start from."""

from django.db.models import F
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from accounts.api.views import TeamView
from accounts.models import Team
from common.api.envelope import ok
from sandboxes import snapshots
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

    required_permission = {  # noqa: RUF012
        "GET": "template:read",
        "DELETE": "template:delete",
    }

    @extend_schema(
        summary="Show a template",
        responses={200: schema.enveloped("Template", schema.TemplateAnswer())}
        | schema.refusals(403, 404),
    )
    def get(self, request: Request, template_id: str) -> Response:
        return ok(template_body(find_template(template_id, self.team)))

    @extend_schema(
        summary="Delete a template of the team",
        description="Sandboxes that were made of it, and their snapshots, stay as they are.",
        responses={200: schema.enveloped("Message", schema.MessageAnswer())}
        | schema.refusals(403, 404),
    )
    def delete(self, request: Request, template_id: str) -> Response:
        found = find_template(template_id, self.team)
        snapshots.delete_template(template=found, by=self.doer)
        return ok({"message": "The template is deleted."})


def find_template(template_id: str, team: Team) -> Template:
    """Return the team's own template of this id, or else the public one.

    Raises:
        TemplateNotFound: there is none.
    """
    if "\0" in template_id:
        raise TemplateNotFound(template_id)
    visible = Template.objects.visible_to(team).filter(template_id=template_id.lower())
    found = visible.order_by(F("team_id").asc(nulls_last=True)).first()
    if found is None:
        raise TemplateNotFound(template_id)
    return found
