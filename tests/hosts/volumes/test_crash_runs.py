"""Forty crashes, and ten more with a store that goes wrong; `bin/bench crash` does more."""

from collections.abc import Iterator

import pytest

from hosts.volumes.failpoints import NAMES
from hosts.volumes.objects import StoreConfig
from launch.bench.crash import RUNS_IN_A_LIFE, Outcome, World, crashes, live, make_base
from launch.bench.crash_worker import working
from tests.s3_proxy import Faults, faulty

LIVES = 8
LIVES_WITH_FAULTS = 2


@pytest.fixture(scope="module")
def world(s3_server: StoreConfig) -> Iterator[World]:
    with working() as workers:
        yield World(s3_server, workers, make_base(s3_server))


@pytest.mark.parametrize("seed", range(LIVES))
def test_a_disk_survives_five_crashes_in_a_row(world: World, seed: int) -> None:
    outcome = Outcome()
    live(world, seed, RUNS_IN_A_LIFE, outcome)
    assert outcome.failures == []
    assert outcome.runs.total() == RUNS_IN_A_LIFE


@pytest.mark.parametrize("seed", range(LIVES, LIVES + LIVES_WITH_FAULTS))
def test_a_disk_survives_crashes_while_a_third_of_all_requests_go_wrong(
    world: World, seed: int
) -> None:
    outcome = Outcome()
    faults = Faults(seed=seed, share=0.33)
    with faulty(world.store, faults) as store:
        live(World(store, world.workers, world.base), seed, RUNS_IN_A_LIFE, outcome)
    assert outcome.failures == []
    assert faults.count


def test_every_step_of_a_disk_is_among_the_crashes() -> None:
    """Those of the collector and of spares have tests of their own."""
    tried = {crash.failpoint for crash in crashes()}
    assert {name for name in NAMES if not name.startswith(("collect.", "spare."))} <= tried
