import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hosts.guest.base import BASES, recipe
from hosts.guest.images import Builder
from hosts.guest.packages import remove_leftovers, scratch_folder


def build(folder: Path, wanted: str) -> bool:
    """Have an image as a recipe says; tells whether it had to be made."""
    with Builder(folder, suite="test")._image("image", wanted) as made:
        if made:
            made.write_text(wanted)
    return made is not None


def fail(folder: Path) -> None:
    """Run out of space half way through making an image."""
    with Builder(folder, suite="test")._image("image", "new") as made:
        assert made is not None
        made.write_text("half")
        raise OSError("full")


def test_an_image_is_made_again_only_when_its_recipe_has_changed(tmp_path: Path) -> None:
    base = BASES["default"]
    larger = replace(base, size_bytes=2 * base.size_bytes)

    made = [build(tmp_path, recipe(wanted)) for wanted in (base, base, larger, larger)]

    assert made == [True, False, True, False]
    assert (tmp_path / "image").read_text() == recipe(larger)


def test_an_image_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    build(tmp_path, "old")

    with pytest.raises(OSError, match="full"):
        fail(tmp_path)

    assert (tmp_path / "image").read_text() == "old"
    assert not build(tmp_path, "old")
    assert not list(tmp_path.glob("*.part"))


@pytest.fixture
def precious(tmp_path: Path) -> Iterator[Path]:
    """A folder of the machine that a killed build has left mounted twice in its scratch."""
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "file").write_text("kept")
    inside = tmp_path / "images/.scratch-dead/root/dev with space"
    inside.mkdir(parents=True)
    for _ in range(2):
        subprocess.run(["mount", "--bind", folder, inside], check=True)
    yield folder
    remove_leftovers(tmp_path / "images")


def test_what_a_killed_build_left_is_unmounted_before_it_is_removed(
    tmp_path: Path, precious: Path
) -> None:
    remove_leftovers(tmp_path / "images")

    assert not list((tmp_path / "images").iterdir())
    assert (precious / "file").read_text() == "kept"
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def test_a_scratch_folder_in_memory_leaves_no_mount(tmp_path: Path) -> None:
    with scratch_folder(tmp_path, in_memory=True) as scratch:
        (scratch / "file").write_text("x")

    assert not list(tmp_path.iterdir())
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
