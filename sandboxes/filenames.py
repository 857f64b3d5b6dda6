"""Names of files as text, so that every name that ext4 allows can be listed and asked for.

Linux names are bytes, JSON and URLs carry text. A name in UTF-8 is that text. A byte that
is not part of any UTF-8 becomes one character of a private block, 0xFF → U+F7FF, so that
the unmodified SDK can send back what it was given; a lone surrogate, Python's own choice,
could not be encoded again by a client. Names that truly hold a character of that block
have its three bytes written in the same way, which keeps the two apart:

    bytes                text
    61 C3 A9             "aé"
    61 FF                "a" U+F7FF
    EF 9F BF (U+F7FF)    U+F7EF U+F79F U+F7BF

`to_bytes(to_text(name)) == name` for every name. Clients may also put the raw bytes in a
query, percent-encoded (`%FF`): they arrive as surrogates, and are understood too. Only a
character of the block itself must be written as it is listed.
"""

_BLOCK = 0xF700
_SURROGATES = 0xDC00
_ODD_BYTES = range(0x80, 0x100)

_TO_TEXT = {_SURROGATES + byte: chr(_BLOCK + byte) for byte in _ODD_BYTES} | {
    _BLOCK + byte: "".join(chr(_BLOCK + part) for part in chr(_BLOCK + byte).encode())
    for byte in _ODD_BYTES
}
_TO_BYTES = {_BLOCK + byte: chr(_SURROGATES + byte) for byte in _ODD_BYTES}


def to_text(name: bytes) -> str:
    """Return a name or path as text without lone surrogates."""
    return name.decode("utf-8", "surrogateescape").translate(_TO_TEXT)


def to_bytes(text: str) -> bytes:
    """Return the bytes of a name or path that `to_text` wrote, or that a client typed.

    Raises:
        UnicodeEncodeError: it holds a surrogate that stands for no byte.
    """
    return text.translate(_TO_BYTES).encode("utf-8", "surrogateescape")
