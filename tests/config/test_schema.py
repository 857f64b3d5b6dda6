"""The schema and its browsable page."""

import re

import pytest
from django.test import Client

pytestmark = pytest.mark.django_db


def test_the_schema_is_served() -> None:
    response = Client().get("/api/schema?format=json")

    assert response.status_code == 200
    paths = response.json()["paths"]
    assert {"/api-keys", "/api-keys/current", "/users/me", "/teams", "/healthz"} <= set(paths)


def test_the_page_runs_under_its_content_security_policy() -> None:
    response = Client().get("/api/docs")

    assert response.status_code == 200
    page, policy = response.content.decode(), response["Content-Security-Policy"]
    assert "script-src 'self'" in policy
    scripts = re.findall(r"<script([^>]*)>", page)
    assert len(scripts) == 3
    for source in re.findall(r'(?:src|href)="([^"]*)"', page):
        assert source.startswith(("/static/", "/api/docs?")), source
    assert all("src=" in script for script in scripts), "no script stands in the page"


def test_the_pages_script_is_a_script() -> None:
    response = Client().get("/api/docs?script=")

    assert response["Content-Type"].startswith("application/javascript")
    assert "/api/schema" in response.content.decode()
