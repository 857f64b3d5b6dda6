"""`hosts.fuse_setup`."""

from pathlib import Path

import pytest

from hosts.fuse_setup import allow_other


@pytest.mark.parametrize("before", [None, "", "#user_allow_other\n", "mount_max = 10"])
def test_it_adds_the_option_once(tmp_path: Path, before: str | None) -> None:
    conf = tmp_path / "fuse.conf"
    if before is not None:
        conf.write_text(before)

    assert allow_other(conf) is True
    assert allow_other(conf) is False

    lines = conf.read_text().splitlines()
    assert lines.count("user_allow_other") == 1
    assert lines[:-1] == (before or "").splitlines()
