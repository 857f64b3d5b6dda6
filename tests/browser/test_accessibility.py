"""What axe-core finds on each page, in light and dark: nothing."""

import json
from typing import Any

import pytest

from config.settings import BASE_DIR
from tests.browser.conftest import Person
from tests.browser.test_console import PAGES

pytestmark = pytest.mark.browser

AXE = BASE_DIR / "node_modules" / "axe-core" / "axe.min.js"
# Beside the rules of WCAG 2.2 A and AA, axe's own good practice.
RUN = """
const done = arguments[arguments.length - 1];
axe.run(document, { resultTypes: ["violations"] }).then(
  (results) => done(results.violations.map(({ id, help, nodes }) => ({
    rule: id, help, where: nodes.slice(0, 5).map(({ target, html }) => `${target} ${html}`),
  }))),
  (error) => done([{ rule: "axe", help: String(error), where: [] }]),
);
"""
STRANGERS_PAGES = {
    "sign-in": "/accounts/login/",
    "sign-up": "/accounts/signup/",
    "reset": "/accounts/password/reset/",
    "not-found": "/no-such-page",
}
MEMBERS_PAGES = PAGES | {
    "e-mail": "/accounts/email/",
    "password": "/accounts/password/change/",
}


def findings(person: Person) -> list[dict[str, Any]]:
    """Return what axe finds wrong with the page that is open."""
    person.driver.set_script_timeout(120)
    person.run(AXE.read_text())
    found: list[dict[str, Any]] = person.driver.execute_async_script(RUN)
    return found


def assert_accessible(person: Person, name: str, theme: str) -> None:
    person.run("SandkeepTheme.choose(arguments[0])", theme)

    found = findings(person)

    assert found == [], f"{name} in {theme}: {json.dumps(found, indent=2)}"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pages_before_the_sign_in_are_accessible(person: Person, theme: str) -> None:
    for name, path in STRANGERS_PAGES.items():
        person.open(path)
        person.find("main h1, main h2")

        assert_accessible(person, name, theme)


def test_every_page_of_the_console_is_accessible(member: Person) -> None:
    for name, path in MEMBERS_PAGES.items():
        member.open(path)
        member.find("main h1, main h2")

        for theme in ("light", "dark"):
            assert_accessible(member, name, theme)


def test_the_claim_dialog_is_accessible(member: Person) -> None:
    member.open("/sandboxes/")
    member.click("[data-claim]")
    member.find("#dialog[open] button[type=submit]")

    for theme in ("light", "dark"):
        assert_accessible(member, "the claim dialog", theme)
