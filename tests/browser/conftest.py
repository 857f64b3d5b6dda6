"""A real Chromium, and a person in it, before the platform that PLATFORM_URL names."""

import os
import secrets
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from config.settings import BASE_DIR

CHROMIUM, CHROMEDRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
SCREENSHOTS = BASE_DIR / "var" / "screenshots"
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Spinners that are drawn without a GPU take the processor from the guests.
    "--force-prefers-reduced-motion",
)
WAIT_S = 30
POST = """
const [path, fields, done] = arguments;
const headers = JSON.parse(document.body.getAttribute("hx-headers"));
fetch(path, { method: "POST", headers, body: new URLSearchParams(fields) }).then(
  (answer) => done(answer.status));
"""
GET = """
const [path, done] = arguments;
fetch(path).then((answer) => done(answer.status));
"""
GONE_S = 120
"""A sandbox that is deleted while it boots, on a slow machine."""
PASSWORD = "a long and quiet sentence"


@pytest.fixture(scope="session")
def platform_url() -> str:
    """Where the running platform is. Missing at home skips; missing in CI fails."""
    url = os.environ.get("PLATFORM_URL", "").rstrip("/")
    missing = [
        name
        for name, there in (
            ("PLATFORM_URL", url),
            (CHROMIUM, Path(CHROMIUM).exists()),
            (CHROMEDRIVER, Path(CHROMEDRIVER).exists()),
        )
        if not there
    ]
    if missing:
        reason = f"missing: {', '.join(missing)}"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    return url


class Person:
    """What a person does with a browser."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        self.url = url

    def open(self, path: str) -> None:
        self.driver.get(path if path.startswith("http") else self.url + path)

    def find(self, selector: str, wait_s: float = WAIT_S) -> WebElement:
        """Return what the selector names, once it is there and shown."""

        def shown(driver: webdriver.Chrome) -> WebElement | None:
            found = driver.find_elements(By.CSS_SELECTOR, selector)
            return next((element for element in found if element.is_displayed()), None)

        found: WebElement = self.wait(shown, selector, wait_s)
        return found

    def click(self, selector: str) -> None:
        """Press what the selector names; once more if the page showed itself anew meanwhile."""

        def pressed(_: object) -> bool:
            self.find(selector).click()
            return True

        wait = WebDriverWait(
            self.driver, WAIT_S, 0.2, ignored_exceptions=[StaleElementReferenceException]
        )
        wait.until(pressed, f"waited in vain to press: {selector}")

    def type(self, selector: str, text: str) -> None:
        field = self.find(selector)
        field.clear()
        field.send_keys(text)

    def posts(self, path: str, **fields: str) -> int:
        """Send a form as another tab of this person would; returns the status."""
        done: int = self.driver.execute_async_script(POST, path, fields)
        return done

    def gets(self, path: str) -> int:
        """Ask for a page as another tab of this person would; returns the status."""
        status: int = self.driver.execute_async_script(GET, path)
        return status

    def has_lost(self, sandbox_id: str) -> None:
        """Wait until the platform, whatever this page shows, has nothing of the sandbox."""
        path = f"/sandboxes/{sandbox_id}/row/"
        self.wait(lambda _: self.gets(path) == 404, f"the end of {sandbox_id}", GONE_S)

    def has_latency(self, latency_s: float) -> None:
        """Let each answer be on its way for so long."""
        self.driver.execute_cdp_cmd("Network.enable", {})
        line = {"latency": latency_s * 1000, "downloadThroughput": -1, "uploadThroughput": -1}
        self.driver.execute_cdp_cmd(
            "Network.emulateNetworkConditions", {"offline": False, **line}
        )

    def run(self, script: str, *args: object) -> Any:
        return self.driver.execute_script(script, *args)

    def wait(self, condition: Callable[..., Any], what: str, wait_s: float = WAIT_S) -> Any:
        wait = WebDriverWait(self.driver, wait_s, poll_frequency=0.2)
        return wait.until(condition, f"waited in vain for: {what}")

    def sees(self, text: str, wait_s: float = WAIT_S) -> None:
        """Wait until the page shows the text."""

        def there(_: object) -> bool:
            return text in self.run("return document.body.innerText")

        self.wait(there, f"the text {text!r}", wait_s)

    def in_terminal(self, text: str, wait_s: float = 4 * WAIT_S) -> None:
        """Wait until the terminal shows the text."""

        def there(_: object) -> bool:
            return text in self.run("return window.SandkeepTerminal?.text() ?? ''")

        self.wait(there, f"{text!r} in the terminal", wait_s)

    def terminal_is_attached(self, wait_s: float) -> None:
        script = "return document.getElementById('terminal')?.dataset.attached"
        self.wait(lambda _: self.run(script), "an attached terminal", wait_s)

    def types_in_terminal(self, line: str) -> None:
        self.driver.find_element(By.CSS_SELECTOR, ".xterm-helper-textarea").send_keys(
            line + Keys.ENTER
        )

    def is_in_state(self, state: str, wait_s: float = WAIT_S) -> None:
        self.find(f'#head[data-state="{state}"]', wait_s)

    def photographs(self, name: str) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(SCREENSHOTS / f"{name}.png"))

    def has_no_errors(self) -> None:
        """Say whether the browser's console stayed free of errors, blocked scripts included."""
        errors = [
            entry["message"]
            for entry in self.driver.get_log("browser")  # type: ignore[no-untyped-call]
            if entry["level"] == "SEVERE"
        ]
        assert errors == []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Photograph what the person saw when a test failed."""
    report = yield
    person = getattr(item, "funcargs", {}).get("person")
    if report.when == "call" and report.failed and person is not None:
        person.photographs(f"failed-{item.name}")
    return report


@pytest.fixture
def person(platform_url: str, tmp_path: Path) -> Iterator[Person]:
    """Someone with a fresh browser, who is not signed in."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1280,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(CHROMEDRIVER))
    try:
        yield Person(driver, platform_url)
    finally:
        driver.quit()


@pytest.fixture
def member(person: Person) -> Person:
    """Someone who has just signed up."""
    person.open("/accounts/signup/")
    person.photographs("sign-up")
    person.type("input[name=email]", f"{secrets.token_hex(6)}@example.com")
    for field in person.driver.find_elements(By.CSS_SELECTOR, "input[type=password]"):
        field.send_keys(PASSWORD)
    for field in person.driver.find_elements(By.CSS_SELECTOR, "input[name=name]"):
        field.send_keys("Ada")
    person.click("main form button[type=submit]")
    person.sees("Sandboxes")
    return person
