"""Convert errors of huggingface_hub to HubError: one line, with the hub's own message."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from stem_edge.bundle.hub.names import HubName
from stem_edge.errors import HubError
from stem_edge.shown import one_line

NETWORK = "check the network, and try again"
OTHER_CACHE = "free some space, or set HF_HUB_CACHE to another folder"
OFFLINE = "HF_HUB_OFFLINE is set, and these files are not in the cache: unset HF_HUB_OFFLINE"
TRANSPORTS = ("httpx", "httpx2", "httpcore", "requests")  # libraries below huggingface_hub
MAX_CHARS = 300  # of the hub's words in our messages
SERVER_ERROR = 500  # from this HTTP status on, the hub is at fault, perhaps for a moment
BUSY = (408, 429)
LOCAL = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE)


class UnreachableError(HubError):
    """The hub cannot be reached, or is busy at present."""


@contextmanager
def asking(name: HubName) -> Iterator[None]:
    """Context manager that raises errors of huggingface_hub about this model as HubError."""
    try:
        yield
    except Exception as error:
        if (explained := _explained(name, error)) is None:
            raise
        raise explained from error


def _explained(name: HubName, error: BaseException) -> HubError | None:
    """Convert errors of huggingface_hub, the network or the disk to HubError; None for others."""
    from huggingface_hub import errors

    said = getattr(error, "server_message", None) or str(error) or type(error).__name__
    said = one_line(said.strip().rstrip("."), MAX_CHARS)
    match error:
        case errors.HfHubHTTPError():
            return _status(name, error.response.status_code, said)
        case errors.OfflineModeIsEnabled():
            return UnreachableError(f"{name}: {OFFLINE}")
        case errors.LocalEntryNotFoundError():
            if error.__cause__ and (found := _explained(name, error.__cause__)):
                return found
            return UnreachableError(f"{name}: is not in the cache ({said}); {NETWORK}")
        case OSError() if error.errno in LOCAL:
            where = error.filename or "the hub's cache"
            return HubError(f"{where}: cannot be written ({error.strerror}); {OTHER_CACHE}")
    if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in TRANSPORTS:
        return UnreachableError(f"{name}: the connection to the hub failed ({said}); {NETWORK}")
    return None


def _status(name: HubName, status: int, said: str) -> HubError:
    answered = f"{name}: the hub answers {status} ({said})"
    if status >= SERVER_ERROR or status in BUSY:
        return UnreachableError(f"{answered}; try later")
    return HubError(f"{answered}; check its name and revision, or log in with: hf auth login")
