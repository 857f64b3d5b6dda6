"""`bin/demo`: does the product's main job against a running platform, through the SDK.

Claims a computer, works on it, puts it to sleep, edits a file of it while it sleeps, wakes
it, finds everything there, and says what it cost: each step with its time and its bytes.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import httpx
from sandbox0 import Client, Sandbox

from launch.config import load
from launch.progress import say

T = TypeVar("T")

PROGRAM = "#!/bin/sh\necho hello from $(hostname), installed in an earlier life\n"
WORK_MIB = 8
WAIT_S = 180.0


class Demo:
    """One run against one platform."""

    def __init__(self, url: str, key: str, template: str) -> None:
        self._client = Client(token=key, base_url=url, timeout=WAIT_S)
        self._http = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=WAIT_S
        )
        self._template = template

    def run(self) -> None:
        """Do all of it. The sandbox is deleted at the end, also when a step fails."""
        sandbox = self.step(
            "claim a computer", lambda: self._client.sandboxes.claim(self._template)
        )
        say(f"     {sandbox.id}")
        try:
            self._use(sandbox)
        finally:
            self.step("delete it", lambda: self._client.sandboxes.delete(sandbox.id))

    def _use(self, sandbox: Sandbox) -> None:
        greeting = self.step(
            "run the first command (boots the machine)",
            lambda: sandbox.cmd("uname -sr").stdout,
        )
        say(f"     {greeting.strip()}")
        digest = self.step(
            f"install a program in /usr/local and write {WORK_MIB} MiB",
            lambda: self._work(sandbox),
        )
        self.step(
            "pause",
            lambda: self._client.sandboxes.pause_and_wait(sandbox.id, timeout_sec=WAIT_S),
        )
        say(f"     {self._storage(sandbox)['uploaded_bytes']:,} bytes uploaded")
        note = self.step("read and edit a file while it sleeps", lambda: self._edit(sandbox))
        say(f"     {note.decode().strip()!r}")
        self.step(
            "resume",
            lambda: self._client.sandboxes.resume_and_wait(sandbox.id, timeout_sec=WAIT_S),
        )
        say(f"     {self._storage(sandbox)['fetched_bytes']:,} bytes fetched")
        self.step("find everything there", lambda: self._check(sandbox, digest))
        say(f"     it cost ${self._details(sandbox)['cost_usd']}")

    def step(self, what: str, act: Callable[[], T]) -> T:
        """Do a step and print how long it took."""
        started = time.monotonic()
        result = act()
        say(f"{time.monotonic() - started:7.2f} s  {what}")
        return result

    def _work(self, sandbox: Sandbox) -> str:
        sandbox.write_file("/usr/local/bin/greet", PROGRAM.encode())
        sandbox.write_file("/root/note.txt", b"written while awake\n")
        body = os.urandom(WORK_MIB << 20)
        sandbox.write_file("/root/work.bin", body)
        done = sandbox.cmd("chmod +x /usr/local/bin/greet")
        _expect(done.exit_code == 0, "chmod failed")
        return hashlib.sha256(body).hexdigest()

    def _edit(self, sandbox: Sandbox) -> bytes:
        before = bytes(sandbox.read_file("/root/note.txt"))
        sandbox.write_file("/root/note.txt", before + b"edited while asleep\n")
        status = self._client.sandboxes.status(sandbox.id).status
        _expect(str(status) == "paused", f"editing woke the sandbox: {status}")
        return bytes(sandbox.read_file("/root/note.txt"))

    def _check(self, sandbox: Sandbox, digest: str) -> None:
        greeting = sandbox.cmd("greet").stdout
        _expect("earlier life" in greeting, f"the program is gone: {greeting!r}")
        found = sandbox.cmd("sha256sum /root/work.bin").stdout.split()[0]
        _expect(found == digest, "the data changed")
        note = bytes(sandbox.read_file("/root/note.txt"))
        _expect(note.endswith(b"edited while asleep\n"), "the edit is gone")
        say(f"     {greeting.strip()}")

    def _details(self, sandbox: Sandbox) -> dict[str, Any]:
        answer = self._http.get(f"/api/v1/sandboxes/{sandbox.id}")
        answer.raise_for_status()
        details: dict[str, Any] = answer.json()["data"]
        return details

    def _storage(self, sandbox: Sandbox) -> dict[str, int]:
        storage: dict[str, int] = self._details(sandbox)["storage"]
        return storage


def _expect(fact: bool, otherwise: str) -> None:
    if not fact:
        raise SystemExit(f"\nNot as promised: {otherwise}")


def platform_of_this_checkout() -> tuple[str, str]:
    """Return the address of the platform that `bin/up` runs here, and a fresh key to it."""
    config = load(os.environ)
    made = subprocess.run(
        [
            config.checkout / "bin/manage",
            *("create_api_key", "--email", "demo@example.com", "--team", "demo"),
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return config.env["PUBLIC_URL"], made.stdout.strip()


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="bin/demo", description=__doc__)
    parser.add_argument("--url", default=os.environ.get("SANDBOX0_BASE_URL"))
    parser.add_argument("--key", default=os.environ.get("SANDBOX0_TOKEN"))
    parser.add_argument("--template", default="default")
    options = parser.parse_args(arguments)
    url, key = options.url, options.key
    if not (url and key):
        url, key = platform_of_this_checkout()
    Demo(url, key, options.template).run()


if __name__ == "__main__":
    main(sys.argv[1:])
