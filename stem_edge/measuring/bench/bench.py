"""Speed and memory of a bundle, alone or against others, with the same tokens in one run.

Every engine runs in a process of its own. They take turns, A B A B, so that other load on the machine
meets all of them; ratios are medians over the rounds.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Unpack

import psutil

import stem_edge
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import InputError
from stem_edge.measuring.bench.figures import (
    BenchReport,
    Settings,
    figures_of,
    ratios,
    token_nbytes,
)
from stem_edge.measuring.bench.rounds import Results, Turns, check_limit
from stem_edge.measuring.bench.subjects import Common, load_options, make_subjects
from stem_edge.measuring.bench.workers import Subject
from stem_edge.measuring.memory.page_cache import drop_pages
from stem_edge.measuring.workload import DEFAULT_TEXT, make_workload, read_ids
from stem_edge.runtime.backends.engines import choose_backbone
from stem_edge.runtime.backends.keywords import LoadKeywords
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.system.user_folder import cache_folder, cpu_info
from stem_edge.units import parse_size

ROUNDS, LOADS = 5, 3
WORK_FOLDER = "bench"
INTEGER_PRODUCTS = ("avx512_vnni", "avx_vnni", "amx_int8")


def bench(
    bundle: str | Path,
    text: str | Path | None = None,
    *,
    against: Iterable[str] = (),
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    rounds: int = ROUNDS,
    loads: int = LOADS,
    cold: bool = False,
    limit: int | str | None = None,
    work: str | Path | None = None,
    notify: Callable[[str], None] = lambda what: None,
    **options: Unpack[LoadKeywords],
) -> BenchReport:
    """Measure a bundle and what it is compared with, which takes minutes with a large one.

    text: a text in UTF-8, or token ids (.npy, .int32), which decide what rows are read, how often.
        Default: the text inside this package.
    against: words of stem_edge.measuring.bench.subjects.AGAINST.
    prompt_tokens, new_tokens: of a round. Default: 512 and 128, or what context and text hold.
    rounds, loads: how often each subject decodes, and loads in a new process.
    cold: also load with no file in the page cache, and decode with no tables in it (Linux).
    limit: memory that each process gets, mapped files included, in a cgroup of its own (Linux). Each
        round then loads anew, with no file in the page cache, one subject after the other, and
        `loads` has no effect. What does not fit stands under `failed`, with its round, and has the
        figures of the rounds before.
    work: folder for the models of llama.cpp. Default: in the user's cache folder.
    notify: called with what is going on, in words; at the end with an empty text.
    options: of stem_edge.load, for every subject whose name does not imply others. context_length
        is for every engine (default: the tokens of a round); "cpu" drops providers and their
        options, "resident" the limit of the device's memory.

    Raises InputError, BackendError, and what loading raises.
    """
    given = LoadOptions(**options)
    opened = given.open(bundle)
    work_load = make_workload(opened, text, prompt_tokens, new_tokens, given.context_length)
    settings = replace(
        settings_of(opened, given, work_load.source, work_load.tokens, rounds),
        prompt_tokens=len(work_load.prompt),
        new_tokens=len(work_load.following),
        loads=loads,
        cold=cold,
        limit=None if limit is None else parse_size(limit),
    )
    _check(settings, opened.path)
    try:
        notify("making what it is compared with")
        subjects = subjects_of(opened, settings, against, work)
        ids = read_ids(DEFAULT_TEXT if text is None else Path(text), opened)
        return _report(opened, settings, Turns(ids, settings, notify).run(subjects))
    finally:
        notify("")


def settings_of(
    bundle: Bundle, given: LoadOptions, source: str, tokens: int, rounds: int
) -> Settings:
    """Return the settings that every bench has. tokens: those for which the context must have room.

    Raises InputError, and BackendError if no engine can run the bundle.
    """
    chosen = choose_backbone(bundle, given.engine)
    if given.repack and chosen != "ggml":
        raise InputError(
            "repack is for ggml, and this bench runs on onnxruntime; leave it out or choose ggml"
        )
    if rounds < 1:
        raise InputError(f"rounds is {rounds}; expected at least 1")
    return Settings(
        text=source,
        prompt_tokens=0,
        new_tokens=0,
        rounds=rounds,
        loads=0,
        context_length=given.context_length or tokens,
        threads=given.cpus,
        cold=False,
        limit=None,
        engine=chosen,
        options=load_options(given),
    )


def subjects_of(
    bundle: Bundle, settings: Settings, against: Iterable[str], work: str | Path | None
) -> list[Subject]:
    """Return the bundle and what it is compared with; may write models for llama.cpp into `work`."""
    folder = cache_folder(None) / WORK_FOLDER if work is None else Path(work)
    common = Common(bundle, settings.engine, settings.options, settings.threads, folder)
    return make_subjects(common, against)


def _check(settings: Settings, bundle: Path) -> None:
    """Raise InputError for what cannot be measured, before minutes are spent on it."""
    if settings.loads < 0:
        raise InputError(f"loads is {settings.loads}; expected at least 0")
    if settings.cold:
        drop_pages(())  # raises where that is not possible
    if settings.limit is not None:
        check_limit(bundle, settings.limit)


def _report(bundle: Bundle, settings: Settings, found: Results) -> BenchReport:
    subjects = {name: figures_of(each) for name, each in found.measured.items() if each.rounds}
    position = settings.prompt_tokens + settings.new_tokens // 2
    nbytes = token_nbytes(bundle, settings.engine, position, settings.options.get("kv", "auto"))
    mine, rates = next(iter(subjects.values())).rounds["median_step"], found.bandwidth
    reached = [step * nbytes / rate for step, rate in zip(mine, rates, strict=bool(rates))]
    return BenchReport(
        bundle=str(bundle.path),
        machine=machine(),
        versions=versions(),
        settings=settings,
        subjects=subjects,
        ratios=ratios(subjects),
        bandwidth=rates,
        token_nbytes=nbytes,
        bandwidth_reached=median(reached) if reached else None,
        failed=found.failed,
    )


def versions() -> dict[str, str]:
    """Return the versions that a report names."""
    return {"stem-edge": stem_edge.__version__, "python": platform.python_version()}


def machine() -> str:
    """Describe processor and memory, as far as the system tells."""
    told = cpu_info()
    name = " ".join(told.get("model name", [])) or platform.processor() or platform.machine()
    flags = told.get("flags", [])
    extras = ", ".join(extra for extra in INTEGER_PRODUCTS if extra in flags) or "no VNNI"
    memory = psutil.virtual_memory().total / 1e9
    return f"{os.cpu_count()} x {name}{f' ({extras})' if flags else ''}, {memory:.0f} GB"
