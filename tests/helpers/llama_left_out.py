"""Tests of llama.cpp's server that are left out, each with its reason; a plug-in of pytest."""

from __future__ import annotations

from typing import NamedTuple

import pytest

# Files that are run; of the others, the reason is in FILES_LEFT_OUT.
FILES = (
    "test_tokenize",
    "test_security",
    "test_chat_completion",
    "test_template",
    "test_basic",
    "test_tool_call",
)
FILES_LEFT_OUT = {
    "test_compat_anthropic": "no interface of Anthropic",
    "test_compat_gcp": "a form of Google's cloud",
    "test_compat_oai_responses": "no responses of OpenAI",
    "test_completion": "llama-server's own form of completions",
    "test_ctx_shift": "shifts a context that is full; an answer ends there",
    "test_embedding": "no embeddings",
    "test_ignore_eos": "llama-server's own option and model",
    "test_infill": "llama-server's own path",
    "test_kv_keep_only_active": "keeps slots in memory, by its log",
    "test_lora": "no LoRA at run time",
    "test_mcp_servers": "runs no tools",
    "test_metrics": "names of its own figures; ours are in test_metrics.py",
    "test_proxy": "proxies of its page",
    "test_rerank": "no rerankers",
    "test_router": "serves one model",
    "test_sleep": "never unloads its model",
    "test_slot_save": "llama-server's own path; see load(prompt_cache=...)",
    "test_speculative": "draft models of its own form",
    "test_stream": "streams that outlive their client, of a router",
    "test_tools_builtin": "runs no tools",
    "test_vision_api": "reads no pictures",
}

TEXT = "expects the text, or the count of tokens, of its own model"
DEBUG = "a field of llama-server's debugging"
CORS = "llama-server lets pages from anywhere ask; here, none but those named"
TEMPLATES = "llama-server has templates by name; here, a bundle brings its own"
NO_PLACE = "the template says nothing of tools, which is refused here"
OWN = "a path or field of llama-server alone"
NO_PICTURES = "reads no pictures"


class LeftOut(NamedTuple):
    """A test, or those of its cases whose name has `case`."""

    test: str
    reason: str
    case: str = ""


LEFT_OUT = (
    LeftOut("test_security::test_access_static_assets_without_api_key", "files of its own page"),
    LeftOut("test_security::test_cors_options", CORS),
    LeftOut("test_security::test_cors_origins_localhost_rejects", "expects 200; here, it is 403"),
    LeftOut("test_security::test_cors_origins_defaults_to_localhost_with_tools_enabled", CORS),
    LeftOut("test_security::test_cors_proxy_only_forwards_explicit_proxy_headers", "no such proxy"),
    LeftOut("test_security::test_local_media_file", NO_PICTURES, "-True]"),
    LeftOut("test_chat_completion::test_chat_completion[", TEXT),
    LeftOut("test_chat_completion::test_chat_completion_cached_tokens", TEXT),
    LeftOut("test_chat_completion::test_chat_completion_stream", TEXT, "Suddenly"),
    LeftOut("test_chat_completion::test_chat_completion_stream", TEXT, "Aside"),
    LeftOut("test_chat_completion::test_chat_completion_with_openai_library", TEXT),
    LeftOut("test_chat_completion::test_chat_completions_token_count", OWN),
    LeftOut("test_chat_completion::test_chat_template", DEBUG),
    LeftOut("test_chat_completion::test_chat_template_assistant_prefill", DEBUG),
    LeftOut("test_chat_completion::test_chat_template_continue_final_message_vllm_compat", DEBUG),
    LeftOut("test_chat_completion::test_apply_chat_template", TEMPLATES),
    LeftOut(
        "test_chat_completion::test_invalid_chat_completion_req",
        "two answers in a row, which the template may allow",
        "messages7",
    ),
    LeftOut(
        "test_chat_completion::test_completion_with_response_format",
        "expects a list by a schema that allows any JSON, such as false; the answer is drawn",
        "response_format1-",
    ),
    LeftOut("test_chat_completion::test_return_progress", OWN),
    LeftOut("test_chat_completion::test_verbose_debug", DEBUG),
    LeftOut("test_template::test_reasoning", NO_PLACE, r"Distill-Qwen-32B-on-<think>\n-tools2"),
    LeftOut("test_template::test_reasoning", NO_PLACE, r"Distill-Qwen-32B-auto-<think>\n-tools2"),
    LeftOut(
        "test_template::test_reasoning", NO_PLACE, r"Distill-Qwen-32B-off-<think>\n</think>-tools2"
    ),
    LeftOut(
        "test_template::test_date_inside_prompt",
        "the template needs variables that llama-server alone makes",
        "firefunction",
    ),
    LeftOut("test_basic::test_server_multiple_addresses", "listens at one address"),
    LeftOut("test_basic::test_server_props", OWN),
    LeftOut("test_basic::test_server_slots", OWN),
    LeftOut("test_basic::test_load_split_model", TEXT),
    LeftOut("test_basic::test_no_ui", "the page cannot be left out"),
    LeftOut("test_basic::test_server_model_aliases_and_tags", OWN),
)


def matches(entry: LeftOut, item: pytest.Item) -> bool:
    """Tell whether an entry means a test."""
    name = f"{item.path.stem}::{item.name}"
    whole = entry.test.endswith("[") or name.partition("[")[0] == entry.test
    return name.startswith(entry.test) and whole and entry.case in name


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave them out; an entry that means none is a mistake."""
    found = {entry: [item for item in items if matches(entry, item)] for entry in LEFT_OUT}
    if unknown := [entry for entry, those in found.items() if not those]:
        raise pytest.UsageError(f"there is no test {unknown[0]}")
    out = {item for those in found.values() for item in those}
    config.hook.pytest_deselected(items=list(out))
    items[:] = [item for item in items if item not in out]
