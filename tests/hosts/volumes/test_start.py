"""What is read first is learned, kept in few bytes, trusted by nobody, and fetched ahead."""

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.units import KiB, MiB
from hosts.volumes.blocks import BLOCK_BYTES, compress
from hosts.volumes.disks import Disks
from hosts.volumes.errors import Corrupt
from hosts.volumes.start import (
    MAX_BLOCKS,
    MAX_BYTES,
    Demand,
    StartRecorder,
    decode_start,
    encode_start,
)
from tests.hosts.volumes.conftest import Host

MAGIC = b"SKSTART\1"


@given(st.lists(st.integers(0, 2**32 - 1), max_size=2000))
def test_block_numbers_come_back_in_their_order(numbers: list[int]) -> None:
    assert decode_start(encode_start(numbers)) == numbers


def test_the_longest_recording_fits_whatever_its_order() -> None:
    numbers = random.Random(1).sample(range(2**30), MAX_BLOCKS)
    body = encode_start(numbers)
    assert len(body) <= MAX_BYTES
    assert decode_start(body) == numbers


def test_a_start_that_reads_in_order_takes_few_bytes() -> None:
    numbers = [run * 5000 + place for run in range(100) for place in range(100)]
    assert len(encode_start(numbers)) < 1500


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"SKSTART\2" + compress(bytes(8)),
        MAGIC,
        MAGIC + b"no frame",
        MAGIC + compress(bytes(7)),
        MAGIC + compress(bytes(4 * MAX_BLOCKS + 4)),
        MAGIC + compress(bytes(64 * MiB)),
        MAGIC + bytes(MAX_BYTES),
    ],
)
def test_what_is_no_recording_is_refused(body: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_start(body)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_recording_or_refused(body: bytes) -> None:
    for candidate in (body, MAGIC + body, MAGIC + compress(body)):
        try:
            assert len(decode_start(candidate)) <= MAX_BLOCKS
        except Corrupt:
            continue


def test_a_recording_has_each_block_once_and_nothing_that_was_read_later(
    tmp_path: Path,
) -> None:
    path = tmp_path / "start"
    recorder = StartRecorder(path, record_s=60)
    recorder.note(5 * BLOCK_BYTES + 100, 10)
    recorder.note(2 * BLOCK_BYTES - 1, 2)
    recorder.note(5 * BLOCK_BYTES, 4096)
    assert not path.exists()
    recorder.finish()
    recorder.note(9 * BLOCK_BYTES, 1)
    recorder.finish()
    assert decode_start(path.read_bytes()) == [5, 1, 2]

    again = StartRecorder(path, record_s=60)
    again.note(0, 1)
    again.finish()
    assert decode_start(path.read_bytes()) == [5, 1, 2]


def test_a_recording_is_bounded(tmp_path: Path) -> None:
    recorder = StartRecorder(tmp_path / "start", record_s=60)
    recorder.note(0, 2 * MAX_BLOCKS * BLOCK_BYTES)
    recorder.finish()
    assert len(decode_start((tmp_path / "start").read_bytes())) == MAX_BLOCKS


def test_nothing_is_begun_ahead_while_many_wait_but_not_for_ever() -> None:
    demand = Demand()
    demand.let_pass(0)
    waits = [demand.waiting() for _ in range(4)]
    for one in waits:
        one.__enter__()
    started = time.monotonic()
    demand.let_pass(0.2)
    assert time.monotonic() - started >= 0.2
    waits[0].__exit__(None, None, None)
    demand.let_pass(60)
    assert time.monotonic() - started < 30


def test_a_second_start_finds_what_the_first_read_and_no_more(host: Host) -> None:
    host.config = replace(host.config, start_s=0.5)
    host.disks = Disks(host.config)
    host.import_base()
    with host.attach() as guest:
        assert host.disks.start_blocks(host.volume_id) is None
        for at in (11 * MiB, 0, 10 * MiB):
            guest.read(at, 512 * KiB)
        learned = eventually_learned(host)
        assert decode_start(learned)[:8] == list(range(176, 184))
        guest.read(2 * MiB, 64 * KiB)
        time.sleep(0.7)
        assert host.disks.start_blocks(host.volume_id) == learned
    host.disks.detach(host.volume_id, discard=True)
    assert host.disks.start_blocks(host.volume_id) is None
    host.empty_cache()

    disk = host.disks.attach(host.volume_id, root_key=host.head, epoch=2, start_blocks=learned)
    await_quiet(host)
    before = host.disks.fetched(host.volume_id)
    assert 512 * KiB < before.bytes < 5 * MiB
    assert disk.epoch == 2
    with host.attach(2) as guest:
        for at in (11 * MiB, 0, 10 * MiB):
            assert guest.read(at, 512 * KiB) == host.expected[at : at + 512 * KiB]
        assert host.disks.fetched(host.volume_id) == before
        host.check(guest)


@pytest.mark.parametrize(
    "start_blocks", [b"", b"rubbish", encode_start([2**32 - 1, 3, 16383, 16384])]
)
def test_a_recording_of_something_else_does_no_harm(host: Host, start_blocks: bytes) -> None:
    host.import_base()
    host.disks.attach(host.volume_id, root_key=host.head, epoch=1, start_blocks=start_blocks)
    with host.attach() as guest:
        host.check(guest)


def test_a_recording_that_a_daemon_has_spoilt_is_none(host: Host) -> None:
    host.import_base()
    host.attach().close()
    file = host.config.run_dir / "disks" / host.volume_id.hex / "start"
    for spoil in (
        lambda: file.write_bytes(b"spoilt"),
        lambda: file.symlink_to("/etc/passwd"),
        file.mkdir,
    ):
        spoil()
        assert host.disks.start_blocks(host.volume_id) is None
        file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink()


def eventually_learned(host: Host) -> bytes:
    deadline = time.monotonic() + 30
    while (learned := host.disks.start_blocks(host.volume_id)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return learned


def await_quiet(host: Host) -> None:
    """Wait until something was fetched, and nothing for a while."""
    before, deadline = None, time.monotonic() + 30
    while before is None or not before.bytes or host.disks.fetched(host.volume_id) != before:
        assert time.monotonic() < deadline
        before = host.disks.fetched(host.volume_id)
        time.sleep(0.5)
