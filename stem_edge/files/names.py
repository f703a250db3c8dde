"""The user's cache folder, and the length of the hashes in names of cached files."""

from __future__ import annotations

from pathlib import Path

from stem_edge.errors import InputError

KEY_CHARS = 32  # of digests in file names
PREPARED = "prepared"  # folder of prepared backbones in the cache folder


def cache_folder(given: str | Path | None) -> Path:
    """Return the given folder; if it is None or "", the user's cache folder. Raises InputError."""
    if given:
        return Path(given)
    from platformdirs import user_cache_path

    try:
        return user_cache_path("stem-edge", appauthor=False)
    except RuntimeError as error:  # in a container, the user may have no name
        raise InputError(
            f"there is no folder for caches ({error}); set HOME, or give cache_dir (--cache-dir)"
        ) from error
