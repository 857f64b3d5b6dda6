"""`/api/v1/templates` and `/api/v1/quotas`."""

from collections.abc import Callable

from rest_framework.test import APIClient
from sandbox0.apispec.models.team_quota import TeamQuota as SdkQuota
from sandbox0.apispec.models.template import Template as SdkTemplate

from accounts.models import Team
from sandboxes.models import Sandbox, Template


def test_public_templates_and_the_teams_own_are_listed(
    alice: APIClient, template: Template, alices_team: Team, mallorys_team: Team
) -> None:
    Template.objects.create(
        team=alices_team,
        template_id="ours",
        spec=template.spec,
        generation=template.generation,
    )
    Template.objects.create(team=mallorys_team, template_id="theirs", spec={})

    data = alice.get("/api/v1/templates").json()["data"]

    assert [one["template_id"] for one in data["templates"]] == ["default", "ours"]
    assert [one["scope"] for one in data["templates"]] == ["public", "team"]
    assert data["count"] == 2
    assert "status" not in data["templates"][0]
    assert [SdkTemplate.from_dict(one).template_id for one in data["templates"]]


def test_one_template_is_shown_whatever_its_case(alice: APIClient, template: Template) -> None:
    data = alice.get("/api/v1/templates/DEFAULT").json()["data"]

    assert data["spec"] == template.spec
    assert "team_id" not in data


def test_the_teams_own_hides_the_public_one(
    alice: APIClient, template: Template, alices_team: Team
) -> None:
    Template.objects.create(team=alices_team, template_id="default", spec={})

    data = alice.get("/api/v1/templates/default").json()["data"]

    assert data["scope"] == "team"
    assert data["status"]["creation"]["state"] == "creating"


def test_another_teams_template_is_not_found(
    mallory: APIClient, template: Template, alices_team: Team
) -> None:
    Template.objects.create(team=alices_team, template_id="ours", spec={})

    for name in ("ours", "nosuch", "a%00b", "%2e%2e"):
        assert mallory.get(f"/api/v1/templates/{name}").status_code == 404


def test_quotas_have_six_dimensions_that_the_sdk_reads(
    alice: APIClient, claim: Callable[..., Sandbox]
) -> None:
    claim()

    data = alice.get("/api/v1/quotas").json()["data"]

    quotas = {one["dimension"]: one for one in data}
    assert [SdkQuota.from_dict(one).team_id for one in data] == [data[0]["team_id"]] * 6
    assert quotas["active_sandboxes"]["current"] == 1
    assert quotas["active_sandboxes"]["limit_value"] == 20
    assert quotas["active_sandboxes"]["remaining"] == 19
    assert quotas["active_sandboxes"]["source"] == "region_default"
    assert quotas["paused_sandboxes"]["limit_value"] == 2000
    assert all(quotas[name]["unlimited"] for name in list(quotas)[2:])


def test_a_raised_limit_is_shown_as_the_teams(alice: APIClient, alices_team: Team) -> None:
    alices_team.running_limit = 30
    alices_team.save()

    data = alice.get("/api/v1/quotas/active_sandboxes").json()["data"]

    assert (data["limit_value"], data["source"]) == (30, "team_override")


def test_an_unknown_dimension_is_refused(alice: APIClient) -> None:
    assert alice.get("/api/v1/quotas/nonsense").status_code == 400
