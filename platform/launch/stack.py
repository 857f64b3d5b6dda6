"""The whole platform on this machine, in the order in which it has to come up."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import psycopg

from hosts.guest.probe import known_accelerator, probe_accelerator
from launch import libvirt_daemons, processes
from launch.config import Config
from launch.guests import leave_no_guest
from launch.people import Person, person
from launch.processes import Program
from launch.progress import LaunchFailed, say, step
from launch.services import own_services
from launch.supervisor import Supervisor

HEALTHY_TIMEOUT_S = 60.0
MANAGE_TIMEOUT_S = 600.0
# A kernel, a toolkit and a Debian are downloaded and packed, on two slow cores.
IMAGES_TIMEOUT_S = 3000.0
WORKER_THREADS = 16
# Packs of some MiB go through many threads: with an arena for each, the C library keeps
# hundreds of MiB that nobody uses any more.
SPARING = {"MALLOC_ARENA_MAX": "2", "MALLOC_TRIM_THRESHOLD_": "16777216"}
# mmdebstrap mounts the host's /proc, /sys and /dev/shm into the tree that it builds. When it is
# killed they would stay there, for the next `rm -r` or `chown -R` to walk into: so it has
# mounts and processes of its own, which the kernel ends with it.
ALONE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


class Stack:
    """Starts and stops one platform. Not to be started twice.

    `interrupted` is asked during each long wait, and ends it with `LaunchFailed`.
    """

    def __init__(
        self, config: Config, who: Person, *, interrupted: Callable[[], bool] = lambda: False
    ) -> None:
        self.config = config
        self.interrupted = interrupted
        self.who = who
        self.supervisor = Supervisor(config)
        self.started_at = datetime.now(UTC)
        self.manage_py = [config.python, str(config.checkout / "manage.py")]

    # -- in order ----------------------------------------------------------------------------

    def start(self) -> None:
        """Bring everything up, until it is healthy.

        Raises:
            LaunchFailed: a step did not work, or was interrupted.
        """
        self.start_services()
        self.start_rest()

    def start_rest(self) -> None:
        """Bring up all but the servers, which must answer."""
        for part in (
            self.start_libvirt,
            self.build_images,
            self.record,
            self.start_processes,
            self.check_health,
        ):
            self._give_up_if_interrupted()
            part()

    def _give_up_if_interrupted(self) -> None:
        if self.interrupted():
            raise LaunchFailed("Interrupted.")

    def start_services(self) -> None:
        """Start the servers whose address was not given."""
        for service in own_services(self.config, self.who):
            self.supervisor.start_service(service)

    def start_libvirt(self) -> None:
        """Start libvirt where it does not run."""
        libvirt_daemons.ensure_running(self.config)

    def build_images(self) -> None:
        """Build what a guest boots from, where it is missing, and choose the accelerator."""
        images = self.config.images_dir
        command = [*ALONE, self.config.python, "-m", "hosts.guest.build"]
        command += ["--images", str(images)]
        # bin/up and bin/test share the images; one builds, the other finds them built.
        with step("Guest images"), _locked(images / ".lock"):
            self.run_as_root(command)
            if known_accelerator(images) is None:
                say("  booting a probe guest, to see whether this machine's KVM works")
                say(f"  guests run on {probe_accelerator(images)}")

    def record(self) -> None:
        """Bring the schema, this machine's row and the default template up to date."""
        image = str(self.config.images_dir / "base-default.ext4")
        self.run_as_root([self.config.python, "-m", "launch.records", image])

    def start_processes(self) -> None:
        """Start web, scheduler, host worker and host gate."""
        for program in self.programs():
            self.supervisor.end_leftover(program)
        for port in ("WEB_PORT", "GATE_PORT"):
            self.supervisor.claim_port(port)
        for program in self.programs():
            self.supervisor.start(program)

    def programs(self) -> list[Program]:
        """Return our own processes. Only those of a host, the last two, are root."""
        python, who = self.config.python, self.who
        ordinary = self.config.environment(who)
        root = self.config.environment()
        web = ["-m", "uvicorn", "config.asgi:application", "--host", "127.0.0.1"]
        web += ["--port", self.config.env["WEB_PORT"], "--no-access-log", "--lifespan", "off"]
        # It listens no more from the signal on, and commands may run for hours: their callers
        # are told, and come back to the next process.
        web += ["--timeout-graceful-shutdown", "3"]
        web += ["--http", "common.server:HttpProtocol"]
        worker = ["-m", "dramatiq", "config.worker", "--processes", "1"]
        worker += ["--threads", str(WORKER_THREADS)]
        worker += ["--queues", f"host.{self.config.env['HOST_NAME']}"]
        return [
            Program("web", [python, *web], ordinary, who),
            Program("scheduler", [*self.manage_py, "run_scheduler"], ordinary, who),
            # Only this process is signalled, never its group: see `processes.start`.
            Program("worker", [python, *worker], root | SPARING, stop_timeout_s=60.0),
            Program("gate", [*self.manage_py, "run_gate"], root),
        ]

    def check_health(self) -> None:
        """Wait until each process does its work.

        Raises:
            LaunchFailed: one does not.
        """
        with step("Health"):
            self._wait_for("web", self._web_is_ready)
            self._wait_for("gate", self._gate_answers)
            self._wait_for("worker", self._host_reports)

    def stop(self) -> None:
        """Stop all that was started, guests included. May be repeated."""
        self.supervisor.stop_together("web", "scheduler", "worker", "gate")
        leave_no_guest(self.config)
        self.supervisor.stop()
        libvirt_daemons.leave(self.config)

    def greet(self) -> None:
        """Say where it is and what to type next."""
        url = self.config.env["PUBLIC_URL"]
        say(f"\nSandkeep is ready: {url}\n")
        say("Next:")
        say(f"  open {url}/accounts/signup/ and make an account, or")
        make_key = "bin/manage create_api_key --email you@example.com --team you"
        say(f"  export SANDBOX0_TOKEN=$({make_key})")
        say(f"  export SANDBOX0_BASE_URL={url}; bin/demo")

    # -- health ------------------------------------------------------------------------------

    def _wait_for(self, name: str, is_ready: Callable[[], bool]) -> None:
        until = time.monotonic() + HEALTHY_TIMEOUT_S
        while not is_ready():
            self._give_up_if_interrupted()
            if time.monotonic() > until:
                log = self.supervisor.log(name)
                raise LaunchFailed(
                    f"{name} is not healthy:\n{processes.last_lines(log)}\n{log}"
                )
            time.sleep(0.2)

    def _web_is_ready(self) -> bool:
        """Tell whether web answers and reaches all that it needs, live hosts included."""
        url = f"http://127.0.0.1:{self.config.env['WEB_PORT']}/readyz"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                json.load(answer)
                return bool(answer.status == 200)  # noqa: PLR2004 - HTTP's OK
        except (OSError, ValueError):
            return False

    def _gate_answers(self) -> bool:
        address = ("127.0.0.1", self.config.port("GATE_PORT"))
        try:
            with socket.create_connection(address, timeout=5) as connection:
                return connection.recv(8).startswith(b"SSH-2.0-")
        except OSError:
            return False

    def _host_reports(self) -> bool:
        """Tell whether the host was heard of since we started.

        The scheduler asks the worker to look around, and the worker writes the time: so this
        sees both of them, and the queue between.
        """
        query = "SELECT seen_at > %s FROM hosts_host WHERE name = %s"
        values = (self.started_at, self.config.env["HOST_NAME"])
        try:
            with psycopg.connect(
                self.config.env["DATABASE_URL"], connect_timeout=5
            ) as database:
                row = database.execute(query, values).fetchone()
        except psycopg.OperationalError:
            return False
        return row is not None and bool(row[0])

    # -- running things ------------------------------------------------------------------------

    def manage(self, *arguments: str) -> str:
        """Run a management command as the ordinary user; return what it printed.

        Raises:
            LaunchFailed: it failed; the text has its last lines.
        """
        command = [*self.manage_py, *arguments]
        answer = subprocess.run(
            command,
            env=self.config.environment(self.who),
            user=self.who.uid,
            group=self.who.gid,
            extra_groups=self.who.groups,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=MANAGE_TIMEOUT_S,
            check=False,
        )
        if answer.returncode:
            lines = (answer.stdout + answer.stderr).splitlines()[-25:]
            raise LaunchFailed(f"manage.py {arguments[0]} failed:\n" + "\n".join(lines))
        return answer.stdout

    def run_as_root(self, command: Sequence[str]) -> None:
        """Run a program that prints its own progress.

        Raises:
            LaunchFailed: it failed.
        """
        child = subprocess.Popen(
            list(command),
            env=self.config.environment(),
            cwd=self.config.checkout,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = self._await(child)
        finally:
            # It runs others in turn (mmdebstrap, mksquashfs): all of them have to go.
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait(timeout=30)
        if code:
            raise LaunchFailed(f"{' '.join(command)} failed with {code}.")

    def _await(self, child: "subprocess.Popen[bytes]") -> int:
        until = time.monotonic() + IMAGES_TIMEOUT_S
        while time.monotonic() < until:
            self._give_up_if_interrupted()
            try:
                return child.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                continue
        raise LaunchFailed(f"{child.args!r} took longer than {IMAGES_TIMEOUT_S:.0f} s.")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def stop_leftovers(config: Config) -> None:
    """Stop what a killed supervisor left: processes, guests and their disks, servers."""
    who = person(config.env["SANDKEEP_USER"])
    stack = Stack(config, who)
    for program in stack.programs():
        stack.supervisor.end_leftover(program)
    leave_no_guest(config)
    for service in own_services(config, who):
        stack.supervisor.end_leftover(service.program)
    libvirt_daemons.leave(config)
