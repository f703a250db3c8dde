"""Batches of the demo model: rows, errors, going on, exactly one result a row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer
from installed import DEMO
from loading import load_fixed
from open_files import posix

import stem_edge
from stem_edge.apps.batches.output import ResultFile
from stem_edge.apps.batches.rows import read_rows
from stem_edge.errors import BundleError, InputError
from stem_edge.files import disk
from stem_edge.runtime.model import Model

Written = Callable[..., Path]
SPAIN = "The capital of Spain is"
PERU = "The capital of Peru is"


def lines(path: Path) -> list[Any]:
    """Return the results of a file."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def run(model: Model | str, source: Path, **options: Any) -> dict[Any, Any]:
    """Answer a file; return the results by id, or by line."""
    output = source.with_name("out.jsonl")
    stem_edge.batch(source, output, model, **options)
    return {found["id"] or f"line {found['line']}": found for found in lines(output)}


def test_rows(model: Model, written: Written) -> None:
    messages = [{"role": "user", "content": SPAIN}]
    rows = written(
        {"prompt": SPAIN},
        {"prompt": SPAIN, "id": "a", "max_new_tokens": 2, "logprobs": 1},
        b"",
        {"messages": messages, "id": 7, "stop": ["."], "temperature": None},
        {"prompt": model.tokenize(SPAIN), "id": "ids"},
        {"prompt": SPAIN, "id": "form", "regex": "( Paris| Rome)", "max_new_tokens": 9},
        {"prompt": SPAIN, "id": "none", "logit_bias": {"0": 1}, "stop": "Madrid"},
    )
    found = run(model, rows, max_new_tokens=4)
    text = model.generate_text(SPAIN, max_new_tokens=4)
    assert found[1] == {
        "id": 1,
        "text": text,
        "finish_reason": "length",
        "usage": found[1]["usage"],
    }
    assert found[1]["usage"]["completion_tokens"] == 4
    assert [len(found["a"]["logprobs"]), found["a"]["usage"]["completion_tokens"]] == [2, 2]
    assert found["ids"]["text"] == text
    assert found[7]["text"] == text.partition(".")[0]
    assert "Madrid" not in found["none"]["text"]
    assert found["form"]["text"] in (" Paris", " Rome")
    assert len(found) == 6


WRONG = [
    (b"not json", None, "not a JSON object"),
    (b"[1]", None, "not a JSON object"),
    (b"\xff\xfe", None, "not a JSON object"),
    (b"[" * 10_000, None, "not a JSON object"),
    (b"[" * (9 << 20), None, "the line is longer than 4,194,304 bytes"),
    ({"prompt": "a", "id": True}, None, "id is True"),
    ({"prompt": "a", "id": ""}, None, "id is ''"),
    ({"prompt": "a", "id": 2**70}, None, "id is 1180591620717411303424"),
    ({"prompt": "a", "custom_id": "b", "id": "openai"}, "openai", "no option custom_id"),
    ({"prompt": "a", "id": "twice"}, None, "an earlier row has the id 'twice'"),
    ({"id": "empty"}, "empty", "either a prompt or messages"),
    ({"id": "both", "prompt": "a", "messages": []}, "both", "either a prompt or messages"),
    ({"id": "kind", "prompt": 5}, "kind", "token ids"),
    ({"id": "talk", "messages": "a"}, "talk", "messages is 'a': Expected `array`"),
    ({"id": "typo", "promt": "a"}, "typo", "either a prompt or messages, found 'promt'; give"),
    ({"id": "field", "prompt": "a", "max_tokens": 5}, "field", "no option max_tokens"),
    ({"id": "hot", "prompt": "a", "temperature": "x"}, "hot", "temperature is 'x'"),
    ({"id": "bias", "prompt": "a", "logit_bias": {"x": 1}}, "bias", "logit_bias has 'x'"),
    ({"id": "long", "prompt": "a " * 9000}, "long", "a context of 256 tokens"),
]


def test_wrong_rows_become_errors_and_others_go_on(model: Model, written: Written) -> None:
    first, last = {"prompt": "a", "id": "twice"}, {"prompt": "b", "id": "last"}
    found = run(model, written(first, *(row for row, _, _ in WRONG), last), max_new_tokens=1)
    for line, (_, id, message) in enumerate(WRONG, 2):
        error = found[id or f"line {line}"]
        assert error["line"] == line
        assert message in error["error"]["message"], error
    assert len(found) == len(WRONG) + 2
    assert found["last"]["finish_reason"] == "length"


def test_sampled_rows_repeat(model: Model, written: Written) -> None:
    rows = written(
        *({"prompt": "Once", "id": id, "temperature": 2} for id in "ab"),
        {"prompt": "Once", "id": "own", "temperature": 2, "seed": 5},
    )

    def texts(**options: Any) -> dict[Any, str]:
        rows.with_name("out.jsonl").unlink(missing_ok=True)
        found = run(model, rows, max_new_tokens=8, **options)
        return {id: each["text"] for id, each in found.items()}

    first = texts(sequences=1)
    assert texts(sequences=1) == first
    assert len(set(first.values())) == 3  # each id has a seed of its own
    assert texts(sequences=1, seed=1) != first
    assert texts(sequences=1, seed=1)["own"] == first["own"]


def test_answers_do_not_depend_on_the_rows_beside_them(model: Model, written: Written) -> None:
    prompts = "The capital of Italy is", "What is the currency of Oman?", "Cuba lies in"
    given = [{"prompt": prompt, "id": prompt} for prompt in prompts]
    together = run(model, written(*given), max_new_tokens=24)
    for row in given:
        source = written(row)
        source.with_name("out.jsonl").unlink()
        (alone,) = run(model, source, max_new_tokens=24).values()
        assert alone["text"] == together[row["id"]]["text"]


@pytest.mark.parametrize("where", ["prompt", "answer"])
def test_an_answer_that_fails_ends_its_row_alone(
    where: str, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row of a token that the others do not have cannot be read: " Peru", or the first of its answer."""
    pread, places = disk.pread, list[int]()

    def noted(file: int, buffer: memoryview, at: int) -> int:
        places.append(at)
        return pread(file, buffer, at)

    def broken(file: int, buffer: memoryview, at: int) -> int:
        if at <= places[0] < at + len(buffer):
            raise OSError(5, "broken")
        return pread(file, buffer, at)

    with load_fixed(DEMO) as model:
        (first,) = model.generate(PERU, max_new_tokens=1)
        token = model.tokenize(PERU)[-2] if where == "prompt" else first.token_ids[0]
    with load_fixed(DEMO) as model, monkeypatch.context() as patch:
        patch.setattr(disk, "pread", noted)
        model.logits([token])
    rows = written({"prompt": "Cuba lies"}, {"prompt": PERU, "id": "p"}, {"prompt": "Oman lies"})
    with load_fixed(DEMO) as model:
        monkeypatch.setattr(disk, "pread", broken)
        found = run(model, rows, max_new_tokens=6)
    assert "broken" in found.pop("p")["error"]["message"]
    assert [len(each["text"]) > 0 for each in found.values()] == [True, True]


def test_each_row_once_however_often_it_goes_on(
    model: Model, written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": "a", "id": n} for n in range(20)] + [{"id": 3}, {"id": "fail"}, b"{"]
    source, output = written(*rows), tmp_path / "out.jsonl"
    options: dict[str, Any] = {"max_new_tokens": 1}
    for done in (7, 14, 21):
        with monkeypatch.context() as patch:
            _interrupt_at(patch, 7)
            with pytest.raises(KeyboardInterrupt):
                stem_edge.batch(source, output, model, **options)
        assert len(lines(output)) == done
        with output.open("ab") as file:
            file.write(b'{"id":19,"te')
    found = stem_edge.batch(source, output, model, **options)
    assert (found.results, found.errors) == (23, 3)
    assert sorted(str(each["id"]) for each in lines(output)) == sorted(
        [*map(str, range(20)), "None", "None", "fail"]
    )
    assert stem_edge.batch(source, output, model, **options).failed == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def _interrupt_at(patch: pytest.MonkeyPatch, count: int) -> None:
    """Raise KeyboardInterrupt once so many results are written."""
    append, left = ResultFile.append, iter(range(count))

    def counted(file: ResultFile, result: Any) -> bool:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return append(file, result)

    patch.setattr(ResultFile, "append", counted)


def test_wrong_calls_are_refused(
    written: Written, tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written({"prompt": "a"})
    other, empty = tmp_path / "other.txt", tmp_path / "empty.jsonl"
    other.write_text("what is no result\n")
    empty.touch()
    cases: list[tuple[Any, Any, Any, str]] = [
        (tmp_path / "no.jsonl", "new", {}, "cannot read the rows"),
        (empty, "new", {}, "has no rows"),
        (source, source, {}, "is the input, too"),
        (source, tmp_path / "no" / "out", {}, "there is no folder"),
        (source, tmp_path, {}, "not a regular file"),
        (source, other, {}, "line 1 is no result"),
        (source, "out", {"temperature": -1}, "temperature is -1"),
        (source, "out", {"memroy": "1GB"}, "no option memroy"),
        (source, "out", {"seed": "x"}, "seed is 'x'"),
        (source, "out", {"sequences": -1}, "sequences is -1"),
        (source, "out", {"threads": 1}, "threads is for loading a bundle"),
        (source, "out", {"ray": "auto"}, "ray is for loading a bundle"),
    ]
    monkeypatch.chdir(tmp_path)
    for path, output, options, message in cases:
        with pytest.raises(InputError, match=message):
            stem_edge.batch(path, output, model, **options)
    with pytest.raises(BundleError):
        stem_edge.batch(source, "none", tmp_path / "no", sequences=2)
    with pytest.raises(InputError, match="threads is 0"):
        stem_edge.batch(source, "none", DEMO, threads=0, sequences=2)
    assert not (tmp_path / "none").exists() and not (tmp_path / "new").exists()
    assert other.read_text() == "what is no result\n"


def test_a_name_on_a_hub_means_one_commit(hub: HubServer, written: Written) -> None:
    hub.add("acme/model", DEMO)
    rows = written({"prompt": SPAIN, "id": "a"})
    assert run("hf:acme/model", rows, progress=False, max_new_tokens=1)["a"]["text"]
    assert hub.requests.count("GET /api/models/acme/model") == 1


def test_http_and_clusters_are_not_imported() -> None:
    absent = "starlette", "anyio", "uvicorn", "ray"
    code = f"import sys, stem_edge; stem_edge.batch; print([*{{*{absent}}} & {{*sys.modules}}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@posix
def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    os.mkfifo(path)
    with ThreadPoolExecutor(1) as writer:
        writer.submit(path.write_bytes, b'{"id":"a"}\n')
        assert [row.id for row in read_rows(path)] == ["a"]
