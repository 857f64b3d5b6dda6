"""Amounts of memory."""

import pytest

from common.units import GiB, MiB
from sandboxes.quantities import (
    NotAQuantity,
    format_memory,
    parse_memory,
    parse_sandbox_memory,
)


@pytest.mark.parametrize(
    ("text", "memory_bytes"),
    [
        ("128Mi", 128 * MiB),
        ("512Mi", 512 * MiB),
        ("1Gi", GiB),
        ("1.5Gi", 1536 * MiB),
        ("0.5Gi", 512 * MiB),
        ("16Gi", 16 * GiB),
        ("16384Mi", 16 * GiB),
        ("524288Ki", 512 * MiB),
        ("536870912", 512 * MiB),
        ("1024000000k", 976562 * MiB + 512 * 1024),
    ],
)
def test_quantities_are_read_as_kubernetes_reads_them(text: str, memory_bytes: int) -> None:
    if memory_bytes % MiB:
        with pytest.raises(NotAQuantity, match="whole number"):
            parse_memory(text)
    else:
        assert parse_memory(text) == memory_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Gi",
        "1 Gi",
        " 1Gi",
        "1gi",
        "1ki",
        "-1Gi",
        "+1Gi",
        "1e3Mi",
        "0x10Mi",
        "1Gib",
        "1.Gi",
        ".5Gi",
        "1,5Gi",
        "nan",
        "1" * 40,
        "0.3Gi",
        "512M",
        "\u0661Gi",
        "1Gi\n",
    ],
)
def test_what_is_no_quantity_of_whole_mebibytes_is_refused(text: str) -> None:
    with pytest.raises(NotAQuantity):
        parse_memory(text)


@pytest.mark.parametrize("text", ["127Mi", "0", "0Gi", "16385Mi", "1Ti"])
def test_a_sandbox_has_128_mebibytes_to_16_gibibytes(text: str) -> None:
    with pytest.raises(NotAQuantity, match="from 128Mi to 16Gi"):
        parse_sandbox_memory(text)


@pytest.mark.parametrize("text", ["128Mi", "1536Mi", "2Gi", "16Gi"])
def test_what_is_written_is_what_was_read(text: str) -> None:
    assert format_memory(parse_sandbox_memory(text)) == text
