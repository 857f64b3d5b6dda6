"""`bin/bench volumes`: what the volume engine costs beside what it is built on."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from hosts.volumes.objects import StoreConfig
from launch.bench.figures import Figure
from launch.bench.rig import Scale
from launch.bench.volume_commits import ahead, background, requests, rotation, upload
from launch.bench.volume_files import opening
from launch.bench.volume_io import io
from launch.bench.volume_others import others
from launch.bench.volume_size import footprint, retained

Part = Callable[[StoreConfig, Path, Scale], Iterator[Figure]]

PARTS: Mapping[str, Part] = {
    "io": io,
    "upload": upload,
    "background": background,
    "ahead": ahead,
    "rotation": rotation,
    "retained": retained,
    "requests": requests,
    "footprint": footprint,
    "open": opening,
    "others": others,
}


def volumes(store: StoreConfig, parts: Sequence[str], scale: Scale) -> Iterator[Figure]:
    """Measure some parts, one after another, each in a folder of its own."""
    for name in parts:
        with tempfile.TemporaryDirectory(prefix="sk-") as folder:
            yield from PARTS[name](store, Path(folder), scale)
