"""onnxruntime sessions with the settings that keep their memory small."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

try:
    import onnxruntime as ort
except ImportError as error:
    from stem_edge.errors import BackendError

    raise BackendError(
        f"onnxruntime cannot be imported ({error}); install it with: pip install onnxruntime"
    ) from error

from stem_edge.errors import BackendError
from stem_edge.runtime.backend import check_memory, reason

CPU = "CPUExecutionProvider"
# onnxruntime also writes what it raises to stderr; users shall read our error, once.
LOG_FATAL_ONLY = 4
# Smaller tensors are written into the graph. Shape inference needs the smallest there; scales must
# not be there: 1.31.1 then forgets them when it saves what it packed, and computes nonsense.
LEAST_EXTERNAL_NBYTES = "64"


def open_session(
    path: Path, threads: int, providers: Sequence[str], *, save_to: Path | None = None
) -> ort.InferenceSession:
    """Load a graph. Raises BackendError.

    save_to: also write the graph there as it was rearranged for this processor, with its weights
    in a file of the same name and .data; loaded from there, they stay in the file.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = LOG_FATAL_ONLY
    # The arena would keep what the longest prompt chunk once needed.
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    # Threads spin between the operators of a step, and stop when the step is done.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if save_to is not None:
        options.optimized_model_filepath = str(save_to)
        prefix = "session.optimized_model_external_initializers_"
        options.add_session_config_entry(prefix + "file_name", save_to.name + ".data")
        options.add_session_config_entry(prefix + "min_size_in_bytes", LEAST_EXTERNAL_NBYTES)
        options.add_session_config_entry(
            "session.save_external_prepacked_constant_initializers", "1"
        )
    missing = [name for name in providers if name not in ort.get_available_providers()]
    if not missing:
        try:
            session = ort.InferenceSession(
                # With its fall-back it would print, and try the same again.
                str(path),
                options,
                providers=list(providers),
                enable_fallback=False,
            )
        except Exception as error:  # onnxruntime raises classes of its own that share no base
            check_memory(error, f"to load {path}")
            raise BackendError(
                f"{path}: onnxruntime {ort.__version__} cannot load this graph ({reason(error)}); run "
                "stem-edge verify, or export again"
            ) from error
        # onnxruntime falls back to the CPU without an error when a provider cannot start.
        missing = [name for name in providers if name not in session.get_providers()]
    if missing:
        raise BackendError(
            f"onnxruntime {ort.__version__} cannot use {', '.join(missing)}; available here: "
            f"{', '.join(ort.get_available_providers())}"
        )
    return session
