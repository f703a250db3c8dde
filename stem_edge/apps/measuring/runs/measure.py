"""Measure time and memory of a bundle, alone or against other models, on the same tokens.

Each run has a process of its own, whose memory this process samples. The models alternate, A B A B,
so that other load on the machine affects all of them. Ratios are medians over the rounds.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Unpack

import psutil

from stem_edge.apps.measuring.runs.results import Report, Round, SubjectResult
from stem_edge.apps.measuring.runs.subjects import load_options, make_subjects
from stem_edge.apps.measuring.runs.workers import Subject, WorkerProcess
from stem_edge.apps.measuring.workload import Workload, make_workload
from stem_edge.errors import InputError, StemEdgeError
from stem_edge.runtime.backends.engines import choose_engine
from stem_edge.runtime.backends.keywords import LoadKeywords
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.loading import open_or_make
from stem_edge.system.page_cache import drop_pages
from stem_edge.system.processor import cpu_info

ROUNDS = 3
SHORT_PROMPT = 16  # tokens, for the time from nothing to a first token
INTEGER_PRODUCTS = ("avx512_vnni", "avx_vnni", "amx_int8")


def measure(
    bundle: str | Path,
    text: str | Path | None = None,
    *,
    against: Iterable[str] = (),
    cases: Iterable[str] = (),
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    rounds: int = ROUNDS,
    cold: bool = False,
    notify: Callable[[str], None] = lambda what: None,
    **options: Unpack[LoadKeywords],
) -> Report:
    """Measure a bundle: time and memory of loading, prompt and decoding; a new process each round.

    text: a text in UTF-8, or token ids (.npy, .int32). The first tokens are the prompt; the next ones are
        decoded one by one. Default: a text in this package.
    against: other bundles to compare with, or GGUF files, which llama.cpp runs. A GGUF file can have
        modes: FILE.gguf,lazy,no-repack (stem_edge.apps.measuring.runs.subjects.LLAMA_MODES).
    cases: the same bundle with other options of load, each like "engine=ggml,slots=1000" or "resident".
    prompt_tokens: tokens of the prompt. Default: 512, or fewer if context or text are shorter.
    new_tokens: tokens decoded. Default: 128, or fewer if context or text are shorter.
    rounds: how often each subject runs. Default: 3.
    cold: take all files out of the page cache before each run.
    notify: called with a line about each run; at the end with an empty text.
    options: of stem_edge.load, for every bundle; `cases` override them.

    If a program fails, the report has its error and its earlier rounds. But if the bundle fails in its first
    round, the error is raised: InputError, BackendError, and what loading raises.
    """
    given = LoadOptions.public(options)
    opened = open_or_make(bundle, given)
    if rounds < 1:
        raise InputError(f"rounds is {rounds}; expected at least 1")
    work = make_workload(opened, text, prompt_tokens, new_tokens, given.context_length)
    chosen = replace(given, engine=choose_engine(opened, given.engine))
    subjects = make_subjects(opened, chosen, cases, against)
    if cold:
        drop_pages(())  # raises where that is not possible
    sizes = given.context_length or work.tokens, given.cpus
    try:
        for subject in subjects:
            _load_once(subject, sizes, notify)
        found = _rounds(subjects, sizes, work, rounds, notify, cold=cold)
    finally:
        notify("")
    settings = {
        "text": work.source,
        "prompt_tokens": len(work.prompt),
        "new_tokens": len(work.following),
        "rounds": rounds,
        "context_length": sizes[0],
        "threads": sizes[1],
        "cold": cold,
        "options": load_options(chosen),
    }
    return Report(str(opened.path), machine(), settings, found)


def _load_once(subject: Subject, sizes: tuple[int, int], notify: Callable[[str], None]) -> None:
    """Load once, so that later loads find repacked weights. sizes: context length, threads."""
    if subject.kind != "stem-edge" or subject.options.get("resident"):
        return
    notify(f"preparing {subject.name}")
    with closing(WorkerProcess(subject)) as worker:
        for name, what in subject.loading(*sizes):
            worker.ask(name, **what)


def _rounds(
    subjects: Sequence[Subject],
    sizes: tuple[int, int],
    work: Workload,
    rounds: int,
    notify: Callable[[str], None],
    *,
    cold: bool,
) -> dict[str, SubjectResult]:
    """Run all rounds; return name -> results of each bundle and GGUF file.

    sizes: context length and threads. cold: drop files from the page cache before each run. A model
    that fails keeps its earlier rounds. Raises InputError, or errors of the first model in round 1.
    """
    found = {subject.name: SubjectResult() for subject in subjects}
    for number, subject in product(range(1, rounds + 1), subjects):
        what, result = f"round {number} of {rounds}: {subject.name}", found[subject.name]
        if result.failed:
            continue
        notify(what)
        try:
            if cold:
                drop_pages(subject.files())
            with closing(WorkerProcess(subject)) as worker:
                result.rounds.append(_round(worker, subject.loading(*sizes), work))
        except StemEdgeError as error:
            first = subject is subjects[0] and not result.rounds
            if first or isinstance(error, InputError):
                raise
            result.failed = f"{what}: {error}"
    return found


def _round(
    worker: WorkerProcess, loading: list[tuple[str, dict[str, Any]]], work: Workload
) -> Round:
    """Measure one run of a model. loading: (name, arguments for the worker) of each loading phase."""
    ids = {"first": work.prompt[:SHORT_PROMPT], "prompt": work.prompt, "decode": work.following}
    phases = [*loading, *((name, {"ids": each}) for name, each in ids.items())]
    return Round([worker.ask(name, **what) for name, what in phases])


def machine() -> str:
    """Return a description of this machine: number and name of processors, and memory."""
    told = cpu_info()
    name = " ".join(told.get("model name", [])) or platform.processor() or platform.machine()
    flags = told.get("flags", [])
    extras = ", ".join(extra for extra in INTEGER_PRODUCTS if extra in flags) or "no VNNI"
    memory = psutil.virtual_memory().total / 1e9
    return f"{os.cpu_count()} x {name}{f' ({extras})' if flags else ''}, {memory:.0f} GB"
