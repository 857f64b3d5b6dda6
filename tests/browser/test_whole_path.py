"""From sign-up to a file that outlived two runs, in a real browser and a real guest."""

import re
import time

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver

from tests.browser.conftest import Person
from tests.browser.test_accessibility import assert_accessible

pytestmark = [pytest.mark.browser, pytest.mark.guest, pytest.mark.timeout(1800)]

# Under software emulation, on a machine that runs other tests at the same time.
BOOT_S = 400
PAUSE_S = 240

# What is there once a tab has all that it shows.
SHOWN = {
    "terminal": "#terminal[data-attached]",
    "files": "[data-entry]",
    "snapshots": "#snapshot-list",
    "history": "#history tbody tr",
    "settings": "main form",
}


def test_a_person_claims_types_pauses_edits_resumes_and_finds_it_all(member: Person) -> None:
    member.open("/sandboxes/")
    member.sees("Your first computer to come back to")
    member.photographs("first-visit")
    member.click("[data-claim]")
    member.find("#dialog[open] button[type=submit]").click()
    member.wait(lambda driver: "/terminal/" in driver.current_url, "the sandbox's page")
    found = re.search(r"/sandboxes/(rs-[a-z0-9-]+)/", member.driver.current_url)
    assert found is not None
    path = f"/sandboxes/{found[1]}"
    member.photographs("starting")

    member.terminal_is_attached(BOOT_S)
    member.is_in_state("running")
    member.types_in_terminal("echo written-while-$((40 + 2)) > /root/notes.txt; stty size")
    member.types_in_terminal("cat /root/notes.txt")
    member.in_terminal("written-while-42\n")
    # Pasted: ChromeDriver's keyboard has no keys for characters beyond the basic plane.
    member.run("SandkeepTerminal.paste(arguments[0])", "echo é😀漢")
    member.types_in_terminal("")
    member.in_terminal("\né😀漢\n")
    member.photographs("terminal")
    member.driver.refresh()
    member.terminal_is_attached(BOOT_S)
    member.in_terminal("written-while-42\n")

    member.click("#head .actions button[hx-post$='/pause/']")
    member.sees("Billing stopped")
    member.photographs("pausing")
    member.is_in_state("paused", PAUSE_S)
    member.sees("asleep")
    member.photographs("asleep")

    edit_while_asleep(member, path)

    member.click("#head .actions button[hx-post$='/resume/']")
    member.is_in_state("running", BOOT_S)
    member.open(f"{path}/terminal/")
    member.terminal_is_attached(BOOT_S)
    member.types_in_terminal("clear; uname -sr; df -h / | tail -1; cat /root/notes.txt")
    member.in_terminal("and edited while asleep")
    member.photographs("resumed")

    saves_a_checkpoint(member, path)
    looks_back(member, path)
    for page in ("terminal", "files", "history", "snapshots", "settings"):
        member.open(f"{path}/{page}/")
        member.find(SHOWN[page], BOOT_S)
        for theme in ("light", "dark"):
            assert_accessible(member, page, theme)
            member.photographs(f"{page}-{theme}")
    member.open("/usage/")
    member.sees(found[1])
    member.photographs("usage")

    delete(member, path)


def saves_a_checkpoint(member: Person, path: str) -> None:
    member.open(f"{path}/history/")
    before = len(member.driver.find_elements(By.CSS_SELECTOR, "#history tbody tr"))
    member.click("#history button[hx-post$='/checkpoint/']")
    member.sees("Saving its disk.")

    def rows(driver: WebDriver) -> bool:
        return len(driver.find_elements(By.CSS_SELECTOR, "#history tbody tr")) > before

    member.wait(rows, "the checkpoint in the history", PAUSE_S)


def looks_back(member: Person, path: str) -> None:
    """Drag the timeline to its oldest state, read a file of it, and fork it."""
    member.open(f"{path}/history/")
    slider = member.find("#moment")
    newest = slider.get_attribute("aria-valuetext")
    slider.send_keys(Keys.HOME)
    assert slider.get_attribute("aria-valuetext") != newest
    member.photographs("timeline")

    member.click("#moment-browse")
    member.sees("As of state #", PAUSE_S)
    member.find("[data-entry='/etc']", PAUSE_S)
    assert not member.driver.find_elements(By.CSS_SELECTOR, "[data-upload]")

    member.open(f"{path}/history/")
    member.find("#moment").send_keys(Keys.HOME)
    member.click("#timeline form[hx-post$='/fork/'] button")
    saves_meanwhile(member, path)
    member.click("#confirm-yes")
    member.sees("Forked from", PAUSE_S)
    member.is_in_state("paused")
    member.photographs("fork")
    member.click("#head .actions button[hx-post$='/delete/']")
    member.click("#confirm-yes")
    member.wait(lambda driver: driver.current_url.endswith("/sandboxes/"), "the list", PAUSE_S)


def saves_meanwhile(member: Person, path: str) -> None:
    """Have a state saved elsewhere: the page must not take the question's form away."""
    before = member.run("return document.querySelectorAll('#history tbody tr').length")
    assert member.posts(f"{path}/checkpoint/") < 400

    def rows(driver: WebDriver) -> bool:
        script = """
        const [path, done] = arguments;
        fetch(path).then((answer) => answer.text()).then((text) => done(
          new DOMParser().parseFromString(text, "text/html")
            .querySelectorAll("#history tbody tr").length));
        """
        return bool(driver.execute_async_script(script, f"{path}/history/") > before)

    member.wait(rows, "the state that was saved meanwhile", PAUSE_S)
    # Longer than the page waits before it fetches what it was told of.
    time.sleep(1)


def edit_while_asleep(member: Person, path: str) -> None:
    member.open(f"{path}/")
    member.find("[data-entry='/root/notes.txt']", PAUSE_S)
    member.sees("Asleep: its saved disk")
    member.photographs("files-asleep")
    member.driver.find_element(By.LINK_TEXT, "notes.txt").click()
    member.find(".CodeMirror", PAUSE_S)
    member.run(
        "SandkeepEditor.setValue(SandkeepEditor.getValue() + arguments[0])",
        "and edited while asleep\n",
    )
    member.photographs("editor")
    member.click("#save")
    member.sees("Saved.", PAUSE_S)
    member.is_in_state("paused")


def delete(member: Person, path: str) -> None:
    member.open(f"{path}/history/")
    member.click("#head .actions button[hx-post$='/delete/']")
    member.sees("Its files go with it, for good")
    member.photographs("delete")
    member.click("#confirm-yes")
    member.wait(lambda driver: driver.current_url.endswith("/sandboxes/"), "the list", PAUSE_S)
