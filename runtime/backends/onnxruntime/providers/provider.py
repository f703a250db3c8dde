"""An execution provider of onnxruntime, as sessions on it take it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CPU_NAME = "CPUExecutionProvider"


@dataclass(frozen=True)
class Provider:
    """An available execution provider, with the arguments that sessions on it take."""

    name: str  # short, for users
    full: str  # onnxruntime's name
    options: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[Any, ...] = ()  # OrtEpDevice; empty for built-in providers

    @property
    def on_cpu(self) -> bool:
        """True for onnxruntime's CPU provider, which has every operator."""
        return self.full == CPU_NAME


CPU = Provider("cpu", CPU_NAME)
