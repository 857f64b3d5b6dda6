"""The console in a real browser, as far as no guest is needed."""

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.browser.conftest import Person

pytestmark = pytest.mark.browser

PAGES = {
    "sandboxes": "/sandboxes/",
    "claim": "/sandboxes/claim/",
    "templates": "/templates/",
    "import": "/templates/import/",
    "keys": "/keys",
    "usage": "/usage/",
    "team": "/team",
}


def test_every_page_loads_without_an_error_in_light_and_dark(member: Person) -> None:
    for theme in ("light", "dark"):
        member.run("SandkeepTheme.choose(arguments[0])", theme)
        for name, path in PAGES.items():
            member.open(path)
            member.find("main h1, main h2")

            member.photographs(f"{name}-{theme}")
            assert member.run("return document.documentElement.dataset.bsTheme") == theme
            member.has_no_errors()


def test_no_page_is_wider_than_a_small_phone(member: Person) -> None:
    member.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True},
    )

    for name, path in PAGES.items():
        member.open(path)
        member.find("main h1, main h2")

        member.photographs(f"{name}-phone")
        assert member.run("return document.documentElement.scrollWidth") <= 360, name


def test_the_keyboard_reaches_everything(member: Person) -> None:
    member.open("/sandboxes/")
    keys = ActionChains(member.driver)

    keys.send_keys(Keys.TAB).perform()
    assert member.driver.switch_to.active_element.text == "Skip to the content"

    keys.send_keys("c").perform()
    dialog = member.find("#dialog[open]")
    assert "Claim a sandbox" in dialog.text
    assert member.run(
        "return document.getElementById('dialog').contains(document.activeElement)"
    )
    member.photographs("claim-dialog")

    keys.send_keys(Keys.ESCAPE).perform()
    member.wait(lambda _: not dialog.is_displayed(), "the dialog to close")

    keys.send_keys("gu").perform()
    member.wait(lambda driver: driver.current_url.endswith("/usage/"), "the usage page")


def test_the_theme_follows_the_system_until_one_is_chosen(person: Person) -> None:
    def prefers(theme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": theme}]
        person.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def shows(theme: str) -> None:
        script = "return document.documentElement.dataset.bsTheme"
        person.wait(lambda _: person.run(script) == theme, f"the {theme} theme")

    prefers("dark")
    person.open("/accounts/login/")
    shows("dark")

    prefers("light")
    shows("light")

    person.run("SandkeepTheme.choose('dark')")
    person.driver.refresh()
    shows("dark")


def test_a_form_says_beside_the_field_what_is_wrong(member: Person) -> None:
    member.open("/sandboxes/claim/")
    member.type("#id_ttl_s", "soon")

    member.click("main form button[type=submit]")

    member.sees("Write a time such as 30m")
    member.photographs("claim-refused")


def claims(member: Person) -> str:
    """Claim a sandbox from the list that is open, which shows it by itself; return its id."""
    claimed = {"template_id": "default", "memory_bytes": str(512 * 1024**2)}
    assert member.posts("/sandboxes/claim/", **claimed) == 200
    link = member.find("#rows a[href^='/sandboxes/rs-']")
    return str(link.get_attribute("href")).split("/sandboxes/")[1].split("/")[0]


def test_the_list_is_live(member: Person) -> None:
    member.open("/sandboxes/")

    # The first visit has the live socket too: what is claimed elsewhere shows by itself.
    member.wait(
        lambda driver: driver.find_element(By.CSS_SELECTOR, "[data-as-of]").text == "Live",
        "the live connection",
    )

    sandbox_id = claims(member)
    assert member.posts(f"/sandboxes/{sandbox_id}/delete/") < 400
    member.has_lost(sandbox_id)
    member.sees("Your first computer to come back to")


def test_the_list_shows_what_changed_while_it_was_being_fetched(member: Person) -> None:
    member.open("/sandboxes/")
    sandbox_id = claims(member)

    # The answer to the first change is on its way for longer than the next change takes.
    member.has_latency(5)
    assert member.posts(f"/sandboxes/{sandbox_id}/delete/") < 400
    member.has_lost(sandbox_id)
    member.has_latency(0)

    member.sees("Your first computer to come back to")


def test_no_form_looks_sent_while_its_page_brings_itself_up_to_date(member: Person) -> None:
    member.open("/sandboxes/")
    sandbox_id = claims(member)
    for page in ("snapshots", "history"):
        member.open(f"/sandboxes/{sandbox_id}/{page}/")
        idle = member.find(f"#{page} .when-idle")

        member.has_latency(5)
        for part in ("head", page):
            member.run("htmx.trigger(arguments[0], 'sandbox:changed')", f"#{part}")
            member.find(f"#{part}.htmx-request")

        assert idle.is_displayed()
        assert texts_that_say_busy(member) == []
        member.has_latency(0)
    assert member.posts(f"/sandboxes/{sandbox_id}/delete/") < 400
    member.has_lost(sandbox_id)


def test_what_a_question_is_about_stays_until_its_answer_is_acted_on(member: Person) -> None:
    member.open("/sandboxes/")
    sandbox_id = claims(member)
    member.open(f"/sandboxes/{sandbox_id}/settings/")
    member.click("#head .actions button[hx-post$='/delete/']")
    member.wait(lambda driver: driver.find_element(By.ID, "confirm-yes").is_displayed(), "it")

    # The dialog shuts a moment before it says so: just then the head's answer comes.
    is_replaced = member.run(
        """
        document.querySelector("#confirm").close("yes");
        const requestConfig = { elt: document.querySelector(arguments[0]) };
        requestConfig.triggeringEvent = { type: "sandbox:changed" };
        const detail = { requestConfig, xhr: { status: 200 }, shouldSwap: true };
        document.dispatchEvent(new CustomEvent("htmx:beforeSwap", { detail }));
        return detail.shouldSwap;
        """,
        "#head",
    )

    assert not is_replaced
    member.wait(lambda driver: driver.current_url.endswith("/sandboxes/"), "the list")
    member.has_lost(sandbox_id)


def texts_that_say_busy(member: Person) -> list[str]:
    """List what buttons say while what they sent is on its way."""
    texts = member.driver.find_elements(By.CSS_SELECTOR, ".when-busy")
    assert texts
    return [text.text for text in texts if text.is_displayed()]
