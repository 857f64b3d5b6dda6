"""What a command costs: through the SDK, against ssh on a connection that is open already."""

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from time import monotonic

import asyncssh
from sandbox0 import Sandbox

from hosts.link import GuestEndpoint, GuestLink, Links
from launch.bench.figures import Figure, spread
from launch.bench.target import Target, run
from launch.progress import LaunchFailed, say, step

BENCH = "exec"
COMMAND = "true"
WARM_UP = 5
AIM = 1.5


def round_trip(target: Target, *, rounds: int) -> Iterator[Figure]:
    """Run `true` in the same guest in three ways, in turn."""
    say("· claim a sandbox …")
    with target.sandbox() as sandbox, step(f"{rounds} rounds of {COMMAND!r}"):
        sdk, agent, ssh = asyncio.run(_measure(target, sandbox, rounds))
    say(f"  SDK {spread(sdk)}")
    say(f"  agent alone, without web {spread(agent)}")
    say(f"  ssh {spread(ssh)}")
    baseline = statistics.median(ssh)
    yield Figure(
        bench=BENCH,
        name="round trip of `true` by the SDK, against ssh",
        value=1000 * statistics.median(sdk),
        baseline=1000 * baseline,
        unit="ms",
        aim=AIM,
    )
    yield Figure(
        bench=BENCH,
        name="of that, asking the guest's agent, against ssh",
        value=1000 * statistics.median(agent),
        baseline=1000 * baseline,
        unit="ms",
    )


async def _measure(
    target: Target, sandbox: Sandbox, rounds: int
) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds that each took: by the SDK, by the agent, by ssh."""
    key = Path(target.config.env["PLATFORM_KEY_FILE"]).read_text()
    links = Links(asyncssh.import_private_key(key))
    endpoint = target.guest(sandbox)
    ways = (_by_sdk(sandbox), _by_agent(links, endpoint), _by_ssh(links, endpoint))
    times: tuple[list[float], ...] = ([], [], [])
    try:
        for number in range(WARM_UP + rounds):
            for way, kept in zip(ways, times, strict=True):
                started = monotonic()
                await way()
                if number >= WARM_UP:
                    kept.append(monotonic() - started)
    finally:
        await links.close()
    return times[0], times[1], times[2]


Way = Callable[[], Awaitable[None]]


def _by_sdk(sandbox: Sandbox) -> Way:
    async def way() -> None:
        # It blocks the loop, on which nothing else has anything to do meanwhile.
        run(sandbox, COMMAND)

    return way


def _by_agent(links: Links, endpoint: GuestEndpoint) -> Way:
    """Ask the agent as the web process does, over a connection of our own."""
    link = GuestLink(links, endpoint)
    count = 0

    async def way() -> None:
        nonlocal count
        count += 1
        identity = f"bench-{count}"
        async with await link.stream("context.run", id=identity, argv=[COMMAND]) as stream:
            while await stream.recv() is not None:
                pass

    return way


def _by_ssh(links: Links, endpoint: GuestEndpoint) -> Way:
    async def way() -> None:
        connection = await links.connection(endpoint)
        done = await connection.ssh.run(COMMAND)
        if done.exit_status != 0:
            raise LaunchFailed(f"ssh … {COMMAND} ended with {done.exit_status}.")

    return way
