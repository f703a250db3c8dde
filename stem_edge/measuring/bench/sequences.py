"""Several sequences at a time: how much faster than one, and how long a new one waits.

Every sequence follows a piece of real text, so that rows are as distinct as those of real answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from stem_edge.bundle.manifest import open_bundle
from stem_edge.errors import InputError
from stem_edge.measuring.bench.bench import ROUNDS, machine, settings_of, subjects_of, versions
from stem_edge.measuring.bench.cases import (
    CaseReport,
    CaseResult,
    Figures,
    Spread,
    cell,
    check_subjects,
    gathered,
    head,
    in_turns,
    loaded,
    medians,
    quotients,
)
from stem_edge.measuring.bench.figures import Settings, peaks_of
from stem_edge.measuring.run.together import lengths, texts_of
from stem_edge.measuring.run.workers import Subject, together_phase
from stem_edge.measuring.run.workload import DEFAULT_TEXT, read_ids, source_of
from stem_edge.runtime.backends.options import LoadKeywords, LoadOptions
from stem_edge.text_table import table

COUNTS = (1, 2, 4, 8, 16)
PROMPT_TOKENS, NEW_TOKENS = 128, 64
Measured = dict[tuple[str, int], list[Figures]]  # subject and sequences -> a round each
RATE, FIRST, ALLOWED = "tokens_per_second", "first_token_seconds", "allowed_gain"
# Title, unit, name in figures, digits, factor from the figure to the unit.
COLUMNS = (
    ("together", "tok/s", RATE, 1, 1.0),
    ("first", "ms", FIRST, 0, 1e3),
    ("longest wait", "ms", "longest_wait_seconds", 0, 1e3),
    ("distinct", "/step", "distinct_rows_per_step", 2, 1.0),
    ("distinct", "/token", "distinct_rows_per_token", 3, 1.0),
    ("read", "/token", "rows_read_per_token", 3, 1.0),
    ("flash", "B/token", "flash_bytes_per_token", 0, 1.0),
    ("anon", "MB", "anonymous", 0, 1e-6),
)
LEGEND = """\
together: all decode; gain: over one sequence, in the same round; first: to the first token of a
prompt, while one fewer decode; x alone: over that with nothing else; longest wait: of those that
decode, meanwhile; distinct: rows that the tokens look up; read: those that the row cache lacked;
anon: peak of anonymous memory and swap"""


def bench_sequences(
    bundle: str | Path,
    text: str | Path | None = None,
    *,
    counts: Sequence[int] = COUNTS,
    against: Iterable[str] = (),
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    rounds: int = ROUNDS,
    work: str | Path | None = None,
    notify: Callable[[str], None] = lambda what: None,
    **options: Unpack[LoadKeywords],
) -> CaseReport:
    """Measure a bundle with several numbers of sequences, beside one.

    counts: numbers of sequences. prompt_tokens, new_tokens: of each, the latter while all decode
    (default: 128 and 64, or a quarter and an eighth of a short context). A text that is too short for all is taken several times. The other
    arguments are those of stem_edge.measuring.bench.bench.

    Raises InputError, BackendError, and what loading raises.
    """
    opened, given = open_bundle(bundle), LoadOptions(**options)
    wanted = sorted({1, *counts})
    if wanted[0] < 1:
        raise InputError(f"sequences has {wanted[0]}; expected numbers from 1 on")
    longest, most = given.context_length or opened.manifest.model.max_context, wanted[-1]
    prompt = min(PROMPT_TOKENS, longest // 4) if prompt_tokens is None else prompt_tokens
    new = min(NEW_TOKENS, longest // 8) if new_tokens is None else new_tokens
    tokens = prompt + max(lengths(most, prompt, new))
    if prompt < 1 or new < 2 or tokens > longest:
        raise InputError(
            f"{most} sequences with prompts of {prompt} tokens and {new} new ones together take "
            f"contexts of {tokens}; expected at most {longest}, prompts of 1 or more, and 2 or more "
            "new ones: change --prompt-tokens and --new-tokens"
        )
    settings = replace(
        settings_of(opened, given, source_of(text), tokens, rounds),
        prompt_tokens=prompt,
        new_tokens=new,
    )
    ids = read_ids(DEFAULT_TEXT if text is None else Path(text), opened)
    try:
        notify("making what it is compared with")
        subjects = [_many(each, most) for each in subjects_of(opened, settings, against, work)]
        check_subjects(subjects)
        found = _run(subjects, settings, wanted, ids, notify)
    finally:
        notify("")
    return CaseReport(str(opened.path), machine(), versions(), settings, list(_results(found)))


def _many(subject: Subject, most: int) -> Subject:
    """Return a subject that is loaded for so many sequences."""
    if subject.kind == "llama.cpp":
        own = {"each": True, "unified": False} | subject.options | {"sequences": most}
    else:  # one more, because a prompt is computed beside the sequences that it joins
        own = subject.options | {"sequences": most + 1}
    return replace(subject, options=own)


def _run(
    subjects: Sequence[Subject],
    settings: Settings,
    counts: Sequence[int],
    ids: list[int],
    notify: Callable[[str], None],
) -> Measured:
    """Return the figures of each round by subject and number of sequences."""
    found: Measured = {(subject.name, count): [] for subject in subjects for count in counts}

    begin = 0  # of the next texts, so that rows of earlier ones do not flatter the row cache

    def run(count: int, turn: int) -> None:
        nonlocal begin
        texts = texts_of(ids, count, settings.prompt_tokens, settings.new_tokens, begin)
        begin += sum(len(text.prompt) + len(text.answer) for text in texts)
        for name, worker in workers.items():
            answer = worker.together(texts, count)
            if turn >= 0:
                found[name, count].append(answer.figures)

    with loaded(subjects, settings, notify) as workers:
        in_turns(counts, settings.rounds, notify, run)
        peaks = {name: peaks_of(worker.sampler) for name, worker in workers.items()}
    for (name, count), rounds in found.items():
        anonymous = float(peaks[name][together_phase(count)].unevictable)
        found[name, count] = [figures | {"anonymous": anonymous} for figures in rounds]
    return found


def _results(found: Measured) -> Iterator[CaseResult]:
    for (name, count), rounds in found.items():
        alone, each = gathered(found[name, 1]), gathered(rounds)
        ratios = {
            "gain": Spread.of(quotients(each[RATE], alone[RATE])),
            "first": Spread.of(quotients(each[FIRST], alone[FIRST])),
        }
        if ALLOWED in each:
            ratios["allowed"] = Spread.of(
                quotients(quotients(each[RATE], alone[RATE]), each[ALLOWED])
            )
        first = next(iter(found))[0]
        if name != first:
            ours = gathered(found[first, count])[RATE]
            ratios["bundle"] = Spread.of(quotients(ours, each[RATE]))
        yield CaseResult(name, str(count), "", medians(each), ratios, each)


def sequences_table(report: CaseReport) -> str:
    """Return the report for people."""
    settings = report.settings
    work = (
        f"prompts of {settings.prompt_tokens}, {settings.new_tokens} tokens of each while all "
        f"decode, {settings.rounds} rounds; {settings.text}"
    )
    titles, units, names, *_ = zip(*COLUMNS, strict=True)
    shown = [at for at, name in enumerate(names) if any(name in r.figures for r in report.results)]
    rows = [("", "sequences", "gain", "x alone", *(titles[at] for at in shown))]
    rows.append(("", "", "", "", *(units[at] for at in shown)))
    for one in report.results:
        cells = [
            cell(one.figures.get(COLUMNS[at][2]), COLUMNS[at][3], COLUMNS[at][4]) for at in shown
        ]
        gain, first = one.ratios["gain"].median, one.ratios["first"].median
        rows.append((one.subject, one.case, f"{gain:.2f}", f"{first:.2f}", *cells))
    lines = [*head(report), work, "", *table(rows), LEGEND, "", *_ratios(report.results)]
    return "\n".join(lines)


def _ratios(results: Sequence[CaseResult]) -> Iterator[str]:
    for one in results:
        if one.case != "1":
            yield f"{one.subject}: {one.case} sequences / 1: {one.ratios['gain']}"
        if "allowed" in one.ratios:
            yield (
                f"  of the {one.figures[ALLOWED]:.2f} that the cost of a step of {one.case} tokens "
                f"allows: {one.ratios['allowed']}"
            )
    for one in results:
        if "bundle" in one.ratios:
            many = "1 sequence" if one.case == "1" else f"{one.case} sequences"
            yield f"bundle / {one.subject}, {many}: {one.ratios['bundle']}"
