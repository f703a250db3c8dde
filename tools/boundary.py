"""The modules on the trust boundary: they read what others may have made, or decide what is kept.

Each with the test files that say what it must do, quickest first. tools/mutate.py changes these modules
and expects those tests to fail; tools/coverage_gate.py expects every branch of them to be taken.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_BUNDLE = (
    "tests/faults/test_limits_names.py",
    "tests/faults/test_limits_bundles.py",
    "tests/test_bundle.py",
    "tests/faults/test_m_*.py",
    "tests/test_verify.py",
)
_TABLES = (
    "tests/faults/test_limits_tables.py",
    "tests/test_shards.py",
    "tests/test_table_store.py",
    "tests/test_token_index.py",
    "tests/faults/test_z_tables.py",
    "tests/faults/test_z_reading.py",
)
_GRAPHS = (
    "tests/test_linear.py",
    "tests/test_graph.py",
    "tests/test_device_rows.py",
)
_SAFETENSORS = (
    "tests/test_safetensors_files.py",
    "tests/faults/test_limits_checkpoints.py",
    "tests/faults/test_c_safetensors.py",
    "tests/faults/test_c_checkpoints.py",
)
_TORCH = (
    "tests/faults/test_limits_archives.py",
    "tests/faults/test_limits_pickles.py",
    "tests/faults/test_limits_checkpoints.py",
    "tests/faults/test_c_torch.py",
    "tests/test_lingua.py",
    "tests/test_blagpt.py",
)
_TOKENIZER = (
    "tests/faults/test_limits_text.py",
    "tests/faults/test_limits_steps.py",
    "tests/test_text.py",
    "tests/faults/test_t_tokenizers.py",
)
_CHAT = (
    "tests/test_chat_worker.py",
    "tests/faults/test_limits_chat.py",
    "tests/faults/test_t_templates.py",
)
_FILES = (
    "tests/faults/test_limits_files.py",
    "tests/faults/test_limits_disk.py",
    "tests/faults/test_limits_paths.py",
)
_DISK = (*_FILES, "tests/test_store.py", "tests/faults/test_d_reads.py")
_CHILD = ("tests/test_child.py", "tests/faults/test_b_native.py")
_TRIAL = (
    "tests/test_verdicts.py",
    "tests/test_trial.py",
    "tests/faults/test_b_native.py",
)
_EVERY = ("tests/faults/test_boundaries.py",)

MODULES: dict[str, tuple[str, ...]] = {
    "stem_edge/bundle.py": _BUNDLE,
    "stem_edge/file_names.py": _BUNDLE,
    "stem_edge/plain_files.py": (*_FILES, *_BUNDLE, *_TABLES),
    "stem_edge/strict_json.py": (*_BUNDLE, *_TABLES),
    "stem_edge/checksums.py": _BUNDLE,
    "stem_edge/zarr_json.py": _TABLES,
    "stem_edge/shards.py": (*_TABLES, "tests/test_store.py"),
    "stem_edge/token_index.py": _TABLES,
    "stem_edge/table_store.py": _TABLES,
    "stem_edge/table_check.py": _TABLES,
    "runtime/store.py": ("tests/test_store.py", *_TABLES),
    "stem_edge/disk.py": _DISK,
    "stem_edge/whole_file.py": (*_FILES, "tests/test_edit_file.py"),
    "stem_edge/edit_file.py": ("tests/test_edit_file.py", "tests/faults/test_e_edits.py"),
    "stem_edge/gguf_tensors.py": ("tests/faults/test_b_backbones.py", "tests/test_gguf_export.py"),
    "stem_edge/graph/encoder.py": _GRAPHS,
    "stem_edge/graph/plan.py": _GRAPHS,
    "stem_edge/graph/device_rows.py": (*_GRAPHS, "tests/test_device_slots.py"),
    "export/magic.py": (*_SAFETENSORS, *_TORCH),
    "export/json_files.py": (*_SAFETENSORS, "tests/test_lingua.py"),
    "export/stored.py": (*_SAFETENSORS, *_TORCH),
    "export/safetensors_files.py": _SAFETENSORS,
    "export/torch_zip.py": _TORCH,
    "export/torch_pickle.py": _TORCH,
    "export/torch_files.py": _TORCH,
    "stem_edge/tokenizer_gate.py": _TOKENIZER,
    "stem_edge/tokenizer_steps.py": _TOKENIZER,
    "runtime/text.py": _TOKENIZER,
    "stem_edge/chat_template.py": _CHAT,
    "stem_edge/chat_worker.py": _CHAT,
    "runtime/chat.py": ("tests/faults/test_limits_chat.py", "tests/faults/test_p_prompts.py"),
    "stem_edge/child.py": _CHILD,
    "stem_edge/verdicts.py": _TRIAL,
    "stem_edge/ggml_check.py": ("tests/test_ggml_check.py",),
    "runtime/trial.py": _TRIAL,
    "runtime/trial_worker.py": ("tests/test_trial_worker.py", *_TRIAL),
    "runtime/safety.py": ("tests/test_verify.py",),
}


def modules() -> list[str]:
    """Those that there are."""
    return [name for name in MODULES if (ROOT / name).exists()]


def tests_of(module: str) -> list[str]:
    """Test files of a module, each once."""
    found: dict[str, None] = {}
    for pattern in (*MODULES[module], *_EVERY):
        paths = sorted(ROOT.glob(pattern))
        found |= dict.fromkeys(path.relative_to(ROOT).as_posix() for path in paths)
    return list(found)
