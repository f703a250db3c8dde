"""Errors of a hub as errors of stem-edge, each with what the hub itself says."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from stem_edge.errors import HubError
from stem_edge.hub.names import HubName

LOG_IN = "log in with: hf auth login"
SERVER_ERROR = 500  # HTTP status from which on the hub is at fault, perhaps for a moment
BUSY = (408, 429)
LOCAL = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE)


class UnreachableError(HubError):
    """The hub does not answer, or the connection was cut: trying again may help."""


def endpoint() -> str | None:
    """Return the address of the hub, or of a mirror of it (HF_ENDPOINT); None for the usual one."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


@contextmanager
def asking(name: HubName) -> Iterator[None]:
    """Turn errors of huggingface_hub, which concern this model, into HubError."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise HubError(f"{name}: {_said(error)}; ask for access there, and {LOG_IN}") from error
    except errors.RepositoryNotFoundError as error:
        said = f"no such model on the hub, or a private one ({_said(error)})"
        raise HubError(f"{name}: {said}; check its name, or {LOG_IN}") from error
    except errors.RevisionNotFoundError as error:
        said = f"no such revision of this model ({_said(error)})"
        raise HubError(f"{name}: {said}; give a branch, a tag or a commit that it has") from error
    except errors.HfHubHTTPError as error:
        status, said = error.response.status_code, _said(error)
        if status >= SERVER_ERROR or status in BUSY:
            raise UnreachableError(
                f"{name}: the hub answers {status} ({said}); try later"
            ) from error
        raise HubError(f"{name}: the hub answers {status} ({said}); {LOG_IN}") from error
    except OSError as error:
        if error.errno in LOCAL:
            where = error.filename or "the hub's cache"
            raise HubError(
                f"{where}: cannot be written ({error.strerror}); free some space, or set HF_HUB_CACHE "
                "to another folder"
            ) from error
        raise _unreachable(name, error) from error
    except Exception as error:
        if not _is_transport(error):
            raise
        raise _unreachable(name, error) from error


def _is_transport(error: Exception) -> bool:
    """Return whether the HTTP library of huggingface_hub, which changes, raised an error."""
    return type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "requests")


def _unreachable(name: HubName, error: Exception) -> UnreachableError:
    said = _one_line(str(error) or type(error).__name__)
    return UnreachableError(
        f"{name}: cannot be fetched ({said}); check the network, or fetch it where there is one"
    )


def _said(error: Exception) -> str:
    """Return the hub's own words, without the addresses that the library puts before them."""
    said = getattr(error, "server_message", None) or str(error).strip().splitlines()[-1]
    return _one_line(said)


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")
