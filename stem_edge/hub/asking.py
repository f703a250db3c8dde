"""Errors of a hub as errors of stem-edge, each with what the hub itself says."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stem_edge.errors import HubError
from stem_edge.files.strict_json import one_line
from stem_edge.hub.names import HubName

LOG_IN = "log in with: hf auth login"
NETWORK = "check the network, and try again"
OTHER_CACHE = "free some space, or set HF_HUB_CACHE to another folder"
TRANSPORTS = ("httpx", "httpx2", "httpcore", "requests")  # below versions of huggingface_hub
OFFLINE = "HF_HUB_OFFLINE is set; what is not in the cache is not fetched: unset HF_HUB_OFFLINE"
XET = "if the hub has no xet, set HF_HUB_DISABLE_XET=1"
XET_TOKEN = re.compile("xet-[a-z]+-token")  # in an address that only a hub with xet has
MAX_CHARS = 300  # of the hub's words in our messages
SERVER_ERROR = 500  # HTTP status from which on the hub is at fault, perhaps for a moment
BUSY = (408, 429)
ANSWER_SECONDS = 10.0  # of silence in a connection, after which the hub is taken for unreachable
LOCAL = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE)


class UnreachableError(HubError):
    """The hub does not answer, or not now."""


class CutError(UnreachableError):
    """A connection was cut; trying again at once may help."""


def endpoint() -> str | None:
    """Return the address of the hub, or of a mirror of it (HF_ENDPOINT); None for the usual one.

    Raises HubError if it is no address.
    """
    found = os.environ.get("HF_ENDPOINT")
    if found is None:
        return None
    if not re.match("https?://.", found):
        raise HubError(
            f"HF_ENDPOINT is {one_line(ascii(found))}, expected an address like "
            "https://huggingface.co; correct it, or unset it"
        )
    return found.rstrip("/")


@contextmanager
def asking(name: HubName, seconds: float = ANSWER_SECONDS) -> Iterator[None]:
    """Turn errors of huggingface_hub, which concern this model, into HubError.

    seconds: how long the hub may be silent.
    """
    try:
        with _limited(seconds):
            yield
    except Exception as error:
        if (explained := _explained(name, error)) is None:
            raise
        raise explained from error


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Limit requests without a limit, because huggingface_hub's client would wait for ever.

    All callers in this process share one client, so the call that set its limit takes it away again.
    """
    from huggingface_hub import get_session

    client: Any = get_session()
    if any(limit is not None for limit in client.timeout.as_dict().values()):
        yield
        return
    client.timeout = seconds
    try:
        yield
    finally:
        client.timeout = None


def _explained(name: HubName, error: BaseException) -> HubError | None:
    """Return an error of the hub's library as ours; None for any other error."""
    from huggingface_hub import errors

    match error:
        case errors.GatedRepoError():
            return HubError(f"{name}: {_said(error)}; ask for access there, and {LOG_IN}")
        case errors.RepositoryNotFoundError():
            said = f"no such model on the hub, or a private one ({_said(error)})"
            return HubError(f"{name}: {said}; check its name, or {LOG_IN}")
        case errors.RevisionNotFoundError():
            said = f"no such revision of this model ({_said(error)})"
            return HubError(f"{name}: {said}; give a branch, a tag or a commit that it has")
        case errors.HfHubHTTPError() if XET_TOKEN.search(str(error)):
            return HubError(f"{name}: the hub refuses xet ({_said(error)}); {XET}")
        case errors.HfHubHTTPError():
            return _status(name, error.response.status_code, _said(error))
        case errors.LocalEntryNotFoundError():  # it has tried some times itself
            if error.__cause__ and (found := _explained(name, error.__cause__)):
                return found
            return UnreachableError(f"{name}: is not in the cache ({_said(error)}); {NETWORK}")
        case errors.OfflineModeIsEnabled():
            return UnreachableError(f"{name}: {OFFLINE}")
        case OSError() if error.errno in LOCAL:
            where = error.filename or "the hub's cache"
            return HubError(f"{where}: cannot be written ({error.strerror}); {OTHER_CACHE}")
    if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in TRANSPORTS:
        said = _one_line(str(error) or type(error).__name__)
        advice = XET if XET_TOKEN.search(str(error)) else NETWORK
        return CutError(f"{name}: the connection to the hub failed ({said}); {advice}")
    # Uploads wrap what was raised in their threads.
    return None if error.__cause__ is None else _explained(name, error.__cause__)


def _status(name: HubName, status: int, said: str) -> HubError:
    told = f"{name}: the hub answers {status} ({said})"
    if status >= SERVER_ERROR or status in BUSY:
        return UnreachableError(f"{told}; try later")
    return HubError(f"{told}; {LOG_IN}")


def _said(error: BaseException) -> str:
    """Return the hub's own words, without the addresses that the library puts before them."""
    said = getattr(error, "server_message", None) or str(error).strip().splitlines()[-1]
    return _one_line(said)


def _one_line(text: str) -> str:
    # What a stranger's server says must not command a terminal.
    return one_line(" ".join(text.split()).rstrip("."), MAX_CHARS)
