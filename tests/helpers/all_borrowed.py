"""Models of transformers all of whose layers borrow keys and values, as Gemma 4's assistants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import transformers


@contextmanager
def sharing_all() -> Iterator[None]:
    """Let transformers 5.23 make models all of whose layers borrow, of which it asks who lends."""
    config = transformers.Gemma4TextConfig
    known = config.kv_sharing_modes.fget

    def modes(self: Any) -> Any:
        count = self.num_hidden_layers
        return ["reuse"] * count if self.num_kv_shared_layers == count else known(self)

    with patch.object(config, "kv_sharing_modes", property(modes)):
        yield
