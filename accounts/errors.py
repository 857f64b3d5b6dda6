"""Why a request about a team or a key is refused."""

from common.errors import Refused


class RolesExceedYours(Refused):
    """A key may do no more than whoever makes it."""

    code = "forbidden"
    status = 403

    def __str__(self) -> str:
        return "A key's roles may not exceed those of whoever makes it."
