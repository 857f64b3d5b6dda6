"""Keeps programs running: starts them, starts them again when they end, and stops them."""

import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launch import processes
from launch.config import Config
from launch.ports import is_free
from launch.processes import PidFiles, Program, Running
from launch.progress import LaunchFailed, say, step
from launch.services import Service, wait_until_ready

LOOK_EVERY_S = 0.25
# A program that keeps dying is started ever more slowly, so that its log stays readable.
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 20.0
# One that ran for so long is well again: the next start is as quick as the first.
STEADY_S = 30.0


@dataclass
class Child:
    """A program that the supervisor keeps running."""

    program: Program
    before: Callable[[], None]
    popen: "subprocess.Popen[bytes]"
    process: Running
    started_at: float
    delay_s: float = FIRST_DELAY_S
    restart_at: float | None = None
    """When to start it again; None while it runs. Monotonic seconds."""


class Supervisor:
    """Starts programs in order, watches them from a thread, stops them in reverse."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.pid_files = PidFiles(config.pid_dir)
        self._children: dict[str, Child] = {}
        # Between the watching thread, which starts again, and `stop`, which must win.
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def log(self, name: str) -> Path:
        """Return where a program's output goes."""
        return self.config.log_dir / f"{name}.log"

    def start_service(self, service: Service) -> None:
        """Start a server and wait until it truly answers.

        Raises:
            LaunchFailed: its port is taken, or it does not answer.
        """
        with step(service.title):
            self.end_leftover(service.program)
            for name in service.port_names:
                self.claim_port(name)
            service.prepare()
            child = self.start(service.program, before=service.prepare)
            wait_until_ready(
                service,
                alive=child.process.is_alive,
                log=self.log(service.program.name),
            )

    def claim_port(self, name: str) -> None:
        """Refuse to go on when somebody else listens on the port of this setting.

        Raises:
            LaunchFailed: somebody does; the text says what to set.
        """
        port = self.config.port(name)
        if not is_free(port):
            raise LaunchFailed(
                f"Port {port} on 127.0.0.1 is taken by another program. "
                f"Stop it, or choose another port: {name}={port + 1} bin/up"
            )

    def end_leftover(self, program: Program) -> None:
        """End what an earlier supervisor left behind when it was killed itself."""
        process = self.pid_files.read(program.name)
        if process is not None:
            say(f"  ending {program.name}, left over from an earlier start")
            processes.stop(process, program.stop_signal, timeout_s=program.stop_timeout_s)
        pid = self.pid_files.last_pid(program.name)
        if pid is not None:
            processes.end_orphans(pid, program.argv)
        self.pid_files.forget(program.name)

    def start(self, program: Program, *, before: Callable[[], None] = lambda: None) -> Child:
        """Start a program and keep it running until `stop`."""
        popen = processes.start(program, log=self.log(program.name))
        process = processes.running(popen.pid) or Running(popen.pid, -1)
        self.pid_files.write(program.name, process)
        child = Child(program, before, popen, process, time.monotonic())
        with self._lock:
            self._children[program.name] = child
            if not self._watcher.is_alive() and not self._stopping.is_set():
                self._watcher.start()
        return child

    def pid(self, name: str) -> int:
        """Return the process number of a program that was started here."""
        return self._children[name].process.pid

    def stop(self) -> None:
        """Stop everything that was started, the last first. May be repeated."""
        self._stopping.set()
        with self._lock:
            children = list(self._children.values())
            self._children.clear()
        for child in reversed(children):
            child.process.ask(child.program.stop_signal)
            self._end(child)

    def stop_together(self, *names: str) -> None:
        """Stop those of these that were started, all at once. May be repeated."""
        with self._lock:
            found = [self._children.pop(name, None) for name in names]
        children = [child for child in found if child is not None]
        for child in children:
            child.process.ask(child.program.stop_signal)
        for child in children:
            self._end(child)

    def _end(self, child: Child) -> None:
        """Wait for a program that was asked to stop, force it if need be, and forget it."""
        program = child.program
        waited_from = time.monotonic()
        if not child.process.wait(program.stop_timeout_s):
            child.process.ask(signal.SIGKILL)
            say(f"  {program.name} did not stop in {program.stop_timeout_s:.0f} s: killed")
        child.popen.wait(timeout=10)
        processes.end_orphans(child.process.pid, program.argv)
        self.pid_files.forget(program.name)
        say(f"  stopped {program.name}  {time.monotonic() - waited_from:.1f} s")

    def _watch(self) -> None:
        while not self._stopping.wait(LOOK_EVERY_S):
            with self._lock:
                for child in self._children.values():
                    self._look_after(child)

    def _look_after(self, child: Child) -> None:
        """Notice that a program ended, and start it again when its delay is over."""
        now = time.monotonic()
        if child.restart_at is None:
            code = child.popen.poll()
            if code is None:
                return
            if now - child.started_at > STEADY_S:
                child.delay_s = FIRST_DELAY_S
            say(
                f"! {child.program.name} ended with {code}; again in {child.delay_s:.1f} s. "
                f"Its log: {self.log(child.program.name)}"
            )
            processes.end_orphans(child.process.pid, child.program.argv)
            child.restart_at = now + child.delay_s
            child.delay_s = min(2 * child.delay_s, LONGEST_DELAY_S)
        elif now >= child.restart_at:
            self._start_again(child)

    def _start_again(self, child: Child) -> None:
        try:
            child.before()
            child.popen = processes.start(child.program, log=self.log(child.program.name))
        except OSError as error:
            say(f"! {child.program.name} could not be started: {error}")
            child.restart_at = time.monotonic() + child.delay_s
            return
        child.process = processes.running(child.popen.pid) or Running(child.popen.pid, -1)
        self.pid_files.write(child.program.name, child.process)
        child.started_at = time.monotonic()
        child.restart_at = None
