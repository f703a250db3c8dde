"""An execution provider of onnxruntime, which runs graphs on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stem_edge.errors import BackendError
from stem_edge.runtime.backends.onnxruntime.providers import ort

CUDA = "CUDAExecutionProvider"


@dataclass(frozen=True)
class Provider:
    """An available execution provider, with the arguments for opening sessions on it."""

    name: str  # onnxruntime's in lower case, without "ExecutionProvider"
    full: str  # onnxruntime's name
    devices: tuple[Any, ...] = ()  # OrtEpDevice; empty for built-in providers

    def open(self, source: str | bytes, options: ort.SessionOptions) -> ort.InferenceSession:
        """Open a session in which this provider must run every operator. Raises what onnxruntime raises."""
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        if not self.devices:
            return ort.InferenceSession(source, options, [self.full], enable_fallback=False)
        options.add_provider_for_devices(list(self.devices), {})
        # onnxruntime appends the CPU by itself.
        return ort.InferenceSession(source, options, enable_fallback=False)

    def check_started(self, graph: object, session: ort.InferenceSession) -> None:
        """Raise BackendError if this provider did not start, which onnxruntime does not report."""
        if self.full not in (found := session.get_providers()):
            raise BackendError(
                f"{graph}: onnxruntime {ort.__version__} did not start {self.name}, and gives no reason; it "
                f"took {', '.join(found)} instead. Install what {self.name} needs, or leave out provider"
            )


CPU = Provider("cpu", "CPUExecutionProvider")
