"""What others do with a disk: the whole image up and down, and nbdkit's own S3 plugin."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import boto3
import zstandard

from common.units import KiB, MiB
from hosts.volumes.daemons import plain_environment
from hosts.volumes.objects import StoreConfig
from hosts.volumes.store import S3ObjectStore
from launch.bench.figures import Figure
from launch.bench.nbd import Nbd
from launch.bench.rig import (
    SCATTER_BYTES,
    Samples,
    Scale,
    await_path,
    data,
    drive,
    host,
    make_image,
    timed,
)
from launch.progress import say, step

BENCH = "volumes"
CHANGE_BYTES = 10 * MiB
PLUGIN_THREADS = 16
PLUGIN_OBJECT_BYTES = 64 * KiB
PLUGIN_REQUESTS = 100


def others(store: StoreConfig, folder: Path, scale: Scale) -> Iterator[Figure]:
    """A pause and a resume, against moving the whole image; cold reads, against the plugin."""
    image = make_image(folder / "image", scale.data_bytes)
    samples = Samples()
    change = min(CHANGE_BYTES, scale.data_bytes // 2)
    with host(folder, store) as one:
        volume = one.volume(one.import_image(image, scale.data_bytes))
        for number in range(1, scale.rounds + 1):
            with step(f"pause and resume, round {number} of {scale.rounds}"):
                volume.attach()
                with Nbd(volume.socket) as nbd:
                    for at in range(0, change, MiB):
                        nbd.write(at, data(MiB, seed=number * 1000 + at))
                commit = partial(one.disks.commit, volume.volume_id, volume.publish)
                samples.add("pause", timed(commit))
                samples.add("up", volume.commits[-1].uploaded_bytes)
                one.disks.detach(volume.volume_id, discard=False)
                one.empty_cache()
                samples.add("resume", timed(volume.attach))
                samples.add("read", _cold_reads(volume.socket))
                volume.discard()
            with step(f"whole image up and down, round {number} of {scale.rounds}"):
                _whole(S3ObjectStore(store), image, number, samples)
        with step("nbdkit's S3 plugin"):
            _plugin(store, folder, image, scale, samples)
    yield from _figures(samples, scale)


def _cold_reads(socket: Path) -> float:
    return drive(socket, size_bytes=4 * KiB, count=PLUGIN_REQUESTS, step_bytes=SCATTER_BYTES)


def _whole(objects: S3ObjectStore, image: Path, number: int, samples: Samples) -> None:
    """Compress all of an image and put it; get it and write it out again."""
    key = f"whole/{number}"

    def up() -> None:
        packed = zstandard.ZstdCompressor(level=1, threads=-1).compress(image.read_bytes())
        objects.put_new(key, packed)
        samples.add("whole bytes", len(packed))

    def down() -> None:
        copy = image.with_suffix(".copy")
        copy.write_bytes(zstandard.ZstdDecompressor().decompress(objects.get(key)))
        copy.unlink()

    samples.add("whole up", timed(up))
    samples.add("whole down", timed(down))


def _plugin(
    store: StoreConfig, folder: Path, image: Path, scale: Scale, samples: Samples
) -> None:
    """Read and write by nbdkit's S3 plugin, an object for each 64 KiB."""
    with _served_by_plugin(store, folder, scale.data_bytes) as socket:
        with Nbd(socket, export="") as nbd:
            head = image.read_bytes()[: scale.data_bytes // 4]
            for at in range(0, len(head), MiB):
                nbd.write(at, head[at : at + MiB])
        rate = drive(
            socket,
            size_bytes=PLUGIN_OBJECT_BYTES,
            count=PLUGIN_REQUESTS,
            step_bytes=SCATTER_BYTES - SCATTER_BYTES % PLUGIN_OBJECT_BYTES,
            export="",
        )
        samples.add("plugin read", rate)
        change = min(CHANGE_BYTES, scale.data_bytes // 2)
        count = change // PLUGIN_OBJECT_BYTES
        rate = drive(
            socket, size_bytes=PLUGIN_OBJECT_BYTES, count=count, writes=True, export=""
        )
        samples.add("plugin write", count / rate)


@contextmanager
def _served_by_plugin(store: StoreConfig, folder: Path, size_bytes: int) -> Iterator[Path]:
    socket, pidfile = folder / "plugin.sock", folder / "plugin.pid"
    command = ["nbdkit", "-f", "-P", str(pidfile), "-U", str(socket)]
    command += ["-t", str(PLUGIN_THREADS), "S3"]
    command += [f"endpoint-url={store.endpoint_url}", f"bucket={store.bucket}"]
    command += [f"key={store.prefix}plugin", f"size={size_bytes}"]
    command += [f"object-size={PLUGIN_OBJECT_BYTES}"]
    environment = plain_environment() | {
        # By the environment, as it is no other process's to see.
        "AWS_ACCESS_KEY_ID": store.access_key_id,
        "AWS_SECRET_ACCESS_KEY": store.secret_access_key,
        "AWS_DEFAULT_REGION": store.region,
        "PYTHONPATH": str(Path(boto3.__file__).parents[1]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, cwd=folder
    ) as server:
        try:
            await_path(pidfile)  # which comes after it listens
            yield socket
        finally:
            server.terminate()
    for path in (socket, pidfile):
        path.unlink(missing_ok=True)


def _figures(samples: Samples, scale: Scale) -> Iterator[Figure]:
    mib = scale.data_bytes // MiB
    rows = (
        (f"pause after a 10 MiB change, against all {mib} MiB up", "pause", "whole up", "s"),
        ("bytes of that", "up", "whole bytes", "bytes"),
        (f"cold resume, against all {mib} MiB down", "resume", "whole down", "s"),
        (
            "pause after it, against writing it by nbdkit's S3 plugin",
            "pause",
            "plugin write",
            "s",
        ),
        ("cold scattered reads, against nbdkit's S3 plugin's", "read", "plugin read", "/s"),
    )
    for name, ours, theirs, unit in rows:
        yield Figure(
            bench=BENCH, name=name, value=samples[ours], baseline=samples[theirs], unit=unit
        )
    say("  the plugin writes through: its writer waits for the store at every write")
