"""Every answer of the API has one shape, whatever went wrong."""

import json
from typing import Any

import pytest
from django.conf import settings
from django.db import OperationalError
from django.http import HttpResponse
from rest_framework.test import APIClient

from accounts.models import Team
from common.api import errors

pytestmark = pytest.mark.urls("tests.common.sample_site")

both = pytest.mark.parametrize("url", ["/api/v1/sample", "/api/v1/async-sample"])


def _error(response: HttpResponse) -> dict[str, Any]:
    body = json.loads(response.content)
    assert body["success"] is False
    assert response["Content-Type"] == "application/json"
    assert response["X-Request-Id"]
    error: dict[str, Any] = body["error"]
    return error


@both
def test_an_answer_carries_its_data(alice: APIClient, alices_team: Team, url: str) -> None:
    response = alice.get(url)

    assert response.status_code == 200
    assert response.json() == {"success": True, "data": {"team": str(alices_team.pk)}}
    assert response["Cache-Control"] == "no-store"
    assert response["X-Content-Type-Options"] == "nosniff"
    assert "default-src 'none'" in response["Content-Security-Policy"]
    assert alice.get(url)["X-Request-Id"] != response["X-Request-Id"]


@both
def test_an_error_of_the_domain_has_its_own_code_and_status(alice: APIClient, url: str) -> None:
    response = alice.get(url, {"fail": "refused"})

    assert response.status_code == 429
    assert _error(response) == {"code": "quota_exceeded", "message": "Full."}


@both
def test_an_unavailable_service_says_when_to_try_again(alice: APIClient, url: str) -> None:
    response = alice.get(url, {"fail": "unavailable"})

    assert response.status_code == 503
    assert _error(response)["code"] == "unavailable"
    assert response["Retry-After"] == "2"


@both
def test_a_bug_tells_no_internals(
    alice: APIClient, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    alice.raise_request_exception = False

    response = alice.get(url, {"fail": "bug"})

    assert response.status_code == 500
    error = _error(response)
    assert error["code"] == "internal_error"
    assert response["X-Request-Id"] in error["message"]
    assert "ZeroDivision" not in response.content.decode()
    assert "ZeroDivisionError" in caplog.text


def test_a_database_that_is_down_is_unavailable(caplog: pytest.LogCaptureFixture) -> None:
    response = errors.handle(OperationalError("password=hunter2"), {})

    assert response is not None
    assert response.status_code == 503
    assert "hunter2" not in str(response.data)


@pytest.mark.parametrize("path", ["/api/v1/nothing", "/teams/x/y/z", "/api-keys/", "/users/"])
def test_an_unknown_path_is_not_found_in_the_envelope(
    nobody: APIClient, path: str, db: None
) -> None:
    response = nobody.get(path)

    assert response.status_code == 404
    assert _error(response)["code"] == "not_found"


def test_a_path_of_the_console_is_not_in_the_envelope(nobody: APIClient, db: None) -> None:
    response = nobody.get("/nothing-here")

    assert response.status_code == 404
    assert response["Content-Type"].startswith("text/html")
    assert "X-Request-Id" not in response


@both
def test_a_method_that_is_not_there_is_405(alice: APIClient, url: str) -> None:
    for method in (alice.put, alice.delete, alice.options):
        response = method(url)
        assert response.status_code == 405
        assert _error(response)["code"] == "method_not_allowed"


@both
def test_a_head_needs_what_a_get_needs(alice: APIClient, nobody: APIClient, url: str) -> None:
    assert alice.head(url).status_code == 200
    assert nobody.head(url).status_code == 401


@both
def test_a_format_that_we_do_not_speak_is_406(alice: APIClient, url: str) -> None:
    response = alice.get(url, HTTP_ACCEPT="text/html")

    assert response.status_code == 406
    assert _error(response)["code"] == "not_acceptable"


@both
@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b'{"name": ', "application/json", 400),
        (b'{"name": "a"} trailing', "application/json", 400),
        (b'{"name": "a"}{"name": "b"}', "application/json", 400),
        (b'{"name": NaN}', "application/json", 400),
        (b'{"name": "\xff\xfe"}', "application/json", 400),
        (b'"name"', "application/json", 400),
        (b"[]", "application/json", 400),
        (b"null", "application/json", 400),
        (b"[" * 200_000, "application/json", 400),
        (b'{"name": "a\\u0000"}', "application/json", 400),
        (b'{"name": "\\ud800"}', "application/json", 400),
        (b'{"name": "a"}', "application/json; charset=bz2", 400),
        (b"name=a", "application/x-www-form-urlencoded", 415),
        (b"<name/>", "text/xml", 415),
        (b"", "application/json", 400),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(
    alice: APIClient, url: str, body: bytes, content_type: str, status: int
) -> None:
    response = alice.post(url, body, content_type=content_type)

    assert response.status_code == status
    assert _error(response)["code"] == errors.CODES[status]


@both
def test_a_body_that_is_too_large_is_413(alice: APIClient, url: str) -> None:
    limit_bytes = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
    assert limit_bytes is not None
    body = b'{"name": "' + b"a" * limit_bytes + b'"}'

    response = alice.post(url, body, content_type="application/json")

    assert response.status_code == 413
    assert _error(response)["code"] == "payload_too_large"


@both
@pytest.mark.parametrize(
    ("body", "details"),
    [
        ({}, {"name": "This field is required."}),
        ({"name": 1, "nmae": 2, "x": 3}, {"nmae": "not known", "x": "not known"}),
        ({"name": "a", "limits": {"tll": 3}}, {"limits.tll": "not known"}),
        ({"name": "a", "limits": {"made": 3}}, {"limits.made": "not known"}),
        ({"name": "a", "limits": {"ttl": -1}}, {"limits.ttl": "greater than"}),
        ({"name": "a", "more": [{}, {"tll": 3}]}, {"more.1.tll": "not known"}),
        ({"name": "a", "limits": "x"}, {"limits": "Invalid data"}),
        ({"name": 5}, {"name": "Not a valid string"}),
        ({"name": True}, {"name": "Not a valid string"}),
        ({"name": ["a"]}, {"name": "Not a valid string"}),
        ({"name": None}, {"name": "may not be null"}),
        ({"name": "a", "limits": {"ttl": "3"}}, {"limits.ttl": "valid integer"}),
        ({"name": "a", "limits": {"ttl": True}}, {"limits.ttl": "valid integer"}),
        ({"name": "a", "limits": {"ttl": 3.0}}, {"limits.ttl": "valid integer"}),
        ({"name": "a", "limits": {"ttl": 3.5}}, {"limits.ttl": "valid integer"}),
        ({"name": "a", "tags": ["a", 5]}, {"tags": "Not a valid string"}),
        ({"name": "a", "open": "true"}, {"open": "valid boolean"}),
        ({"name": "a", "open": 1}, {"open": "valid boolean"}),
    ],
)
def test_what_is_wrong_is_named_by_its_path(
    alice: APIClient, url: str, body: dict[str, Any], details: dict[str, str]
) -> None:
    response = alice.post(url, body, format="json")

    assert response.status_code == 400
    error = _error(response)
    assert error["details"].keys() == details.keys()
    for path, words in details.items():
        assert words in error["details"][path][0]
    assert error["message"].startswith(f"{next(iter(details))}: ")
