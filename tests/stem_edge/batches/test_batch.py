"""Batches of the demo model: both forms of rows, errors, going on, exactly one result a row."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chats import thinking
from hub_server import HubServer
from installed import DEMO

import stem_edge
from stem_edge.batches.batch import split
from stem_edge.batches.rows import InputRow, Result
from stem_edge.batches.run import answer
from stem_edge.batches.settings import Settings
from stem_edge.bundle.manifest import TABLES
from stem_edge.errors import BundleError, InputError
from stem_edge.runtime.model import Model

Written = Callable[..., Path]
SPAIN = "The capital of Spain is"
CHAT = {"messages": [{"role": "user", "content": SPAIN}], "temperature": 0, "max_tokens": 4}
TEXT = {"prompt": SPAIN, "temperature": 0, "max_tokens": 4}


def openai(id: Any, body: Any, url: str = "/v1/completions", method: str = "POST") -> Any:
    """Return a row in OpenAI's form."""
    return {"custom_id": id, "method": method, "url": url, "body": body}


def lines(path: Path) -> list[Any]:
    """Return the results of a file."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def run(model: Model | str, source: Path, **options: Any) -> dict[Any, Any]:
    """Answer a file; return the results by id, or by line."""
    output = source.with_name("out.jsonl")
    stem_edge.batch(source, output, model, **options)
    return {_id(found): found for found in lines(output)}


def _id(found: Any) -> Any:
    return found.get("custom_id") or found["id"] or f"line {found['line']}"


def echo(rows: Iterable[InputRow]) -> Iterator[Result]:
    """Answer rows with their own JSON, which needs no model; those with "fail" are errors."""
    for row in rows:
        failed = row.wrong is not None or b"fail" in row.data
        error = {"error": {"message": row.wrong or "failed"}} if failed else {}
        data = json.dumps({"id": row.id, "line": row.line, "text": row.data.decode(), **error})
        yield Result(row.id, row.line, data.replace('{"id": ', '{"id":', 1).encode(), failed)


def test_plain_rows(model: Model, written: Written) -> None:
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


def test_openai_rows_are_answered_as_by_the_server(model: Model, written: Written) -> None:
    rows = written(
        openai("chat", CHAT, "/v1/chat/completions"),
        openai("text", TEXT | {"prompt": [SPAIN, "The capital of Peru is"], "echo": True}),
        openai("two", CHAT | {"n": 2, "logprobs": True, "seed": 1}, "/v1/chat/completions"),
        openai("none", TEXT | {"max_tokens": 0, "echo": True}),
    )
    found = run(model, rows, name="demo")
    text = model.generate_text(SPAIN, max_new_tokens=4)
    assert {each["response"]["status_code"] for each in found.values()} == {200}
    body = found["chat"]["response"]["body"]
    assert body["choices"][0]["message"]["content"] == text
    assert [body["object"], body["model"]] == ["chat.completion", "demo"]
    choices = found["text"]["response"]["body"]["choices"]
    assert choices[0]["text"] == SPAIN + text
    assert [choice["index"] for choice in choices] == [0, 1]
    assert len(found["two"]["response"]["body"]["choices"][1]["logprobs"]["content"]) == 4
    assert found["none"]["response"]["body"]["choices"][0]["text"] == SPAIN


def test_thoughts_are_beside_the_text(written: Written, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "The capital of France is"}]
    chat = {"messages": messages, "max_tokens": 11, "temperature": 0}
    with thinking(tmp_path) as bundle, stem_edge.load(bundle, warm_start=False) as model:
        rows = written({"messages": messages}, openai("chat", chat, "/v1/chat/completions"))
        found = run(model, rows, max_new_tokens=11)
    message = found["chat"]["response"]["body"]["choices"][0]["message"]
    assert [message["content"], message["reasoning_content"]] == ["in Europe.", "Paris. It is a"]
    plain = found[1]
    assert [plain["text"], plain["reasoning_content"]] == ["in Europe.", "Paris. It is a"]


WRONG = [
    (b"not json", None, "not a JSON object"),
    (b"[1]", None, "not a JSON object"),
    (b"\xff\xfe", None, "not a JSON object"),
    (b"[" * 10_000, None, "not a JSON object"),
    ({"prompt": "a", "id": True}, None, "id is True"),
    ({"prompt": "a", "id": ""}, None, "id is ''"),
    ({"prompt": "a", "id": 2**70}, None, "id is 1180591620717411303424"),
    ({"custom_id": 5}, None, "custom_id is 5"),
    ({"prompt": "a", "id": "twice"}, None, "an earlier row has the id 'twice'"),
    ({"id": "empty"}, "empty", "either a prompt or messages"),
    ({"id": "both", "prompt": "a", "messages": []}, "both", "either a prompt or messages"),
    ({"id": "kind", "prompt": 5}, "kind", "token ids"),
    ({"id": "talk", "messages": "a"}, "talk", "messages is not a list"),
    ({"id": "typo", "promt": "a"}, "typo", "no option promt"),
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


@pytest.mark.parametrize(
    ("row", "status", "message"),
    [
        (openai("a", TEXT | {"stream": True}), 400, "stream is not for batches"),
        (openai("a", TEXT | {"echo": True, "logprobs": 1}), 400, "log probabilities of prompts"),
        (openai("a", TEXT | {"n": 0}), 400, "n is 0"),
        (openai("a", {"prompt": 5}), 400, "prompt"),
        (openai("a", {}, "/v1/chat/completions"), 400, "messages"),
        (openai("a", CHAT | {"tools": [{}]}, "/v1/chat/completions"), 400, "tools"),
        (openai("a", TEXT, "/v1/embeddings"), 404, "url is '/v1/embeddings'"),
        (openai("a", TEXT, method="GET"), 405, "method is 'GET'"),
        ({"custom_id": "a"}, 400, "method"),
    ],
)
def test_wrong_requests_get_the_server_s_errors(
    row: Any, status: int, message: str, model: Model, written: Written
) -> None:
    response = run(model, written(row))["a"]["response"]
    assert response["status_code"] == status
    assert message in response["body"]["error"]["message"]


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


def test_answers_do_not_tell_which_rows_ran_beside_them(model: Model) -> None:
    prompts = "The capital of Italy is", "What is the currency of Oman?", "Cuba lies in"
    data = [json.dumps({"prompt": prompt, "id": prompt}).encode() for prompt in prompts]
    rows = [InputRow(json.loads(each)["id"], 1, each) for each in data]
    settings = Settings({"max_new_tokens": 24})
    together = {each.id: json.loads(each.data)["text"] for each in answer(model, rows, settings)}
    for row in rows:
        (alone,) = answer(model, [row], settings)
        assert json.loads(alone.data)["text"] == together[row.id]


def test_each_row_once_however_often_it_goes_on(written: Written, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "id": n} for n in range(20)] + [{"id": 3}, {"id": "fail"}, b"{"]
    source, output = written(*rows), tmp_path / "out.jsonl"

    def cut(given: Iterable[InputRow]) -> Iterator[Result]:
        for number, result in enumerate(echo(given)):
            if number == 7:
                raise KeyboardInterrupt
            yield result
            yield result  # as after a machine that was lost

    for done in (7, 14, 21):
        with pytest.raises(KeyboardInterrupt):
            stem_edge.batch(source, output, answers=cut)
        assert len(lines(output)) == done
        with output.open("ab") as file:
            file.write(b'{"id":19,"te')
    found = stem_edge.batch(source, output, answers=echo)
    assert (found.answered, found.failed, found.results, found.errors) == (0, 2, 23, 3)
    assert [each["id"] for each in lines(output)] == [*range(20), None, "fail", None]
    assert stem_edge.batch(source, output, answers=echo).failed == 0
    found = stem_edge.batch(source, output, answers=echo, retry_errors=True)
    assert (found.answered, found.failed, found.results) == (0, 3, 23)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_what_cannot_be_a_batch_is_refused(
    written: Written, tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written({"prompt": "a"})
    other, empty = tmp_path / "other.txt", tmp_path / "empty.jsonl"
    other.write_text("what is no result\n")
    empty.touch()
    cases: list[tuple[Any, Any, Any, str]] = [
        (tmp_path / "no.jsonl", "out", {}, "cannot read the rows"),
        (empty, "out", {}, "has no rows"),
        (source, source, {}, "is the input, too"),
        (source, tmp_path / "no" / "out", {}, "there is no folder"),
        (source, tmp_path, {}, "not a regular file"),
        (source, other, {}, "line 1 is no result"),
        (source, "out.parquet", {}, "lines of JSON"),
        (source, "out", {"column": "a"}, "column is for parquet"),
        (source, "out", {"temperature": -1}, "temperature is -1"),
        (source, "out", {"memroy": "1GB"}, "no option memroy"),
        (source, "out", {"seed": "x"}, "seed is 'x'"),
        (source, "out", {"sequences": -1}, "sequences is -1"),
    ]
    monkeypatch.chdir(tmp_path)
    for path, output, options, message in cases:
        with pytest.raises(InputError, match=message):
            stem_edge.batch(path, output, answers=echo, **options)
    with pytest.raises(InputError, match="either a model or answers"):
        stem_edge.batch(source, "out")
    with pytest.raises(InputError, match="either a model or answers"):
        stem_edge.batch(source, "out", model, answers=echo)
    with pytest.raises(InputError, match="threads is an option of loading"):
        stem_edge.batch(source, "out", model, threads=1)
    for unused in ({"temperature": 1.0}, {"memory": "1GB"}, {"name": "a"}):
        with pytest.raises(InputError, match=f"{min(unused)} is not for answers"):
            stem_edge.batch(source, "out", answers=echo, **unused)
    with pytest.raises(BundleError):
        stem_edge.batch(source, "none", tmp_path / "no", sequences=2)
    with pytest.raises(InputError, match="threads is 0"):
        stem_edge.batch(source, "none", DEMO, threads=0, sequences=2)
    with pytest.raises(InputError, match="need a file"):
        stem_edge.batch(source, "-", answers=echo)
    assert not (tmp_path / "none").exists()
    assert other.read_text() == "what is no result\n"


def test_a_name_on_a_hub_means_one_commit(hub: HubServer, written: Written) -> None:
    hub.add("acme/model", DEMO)
    source = written(openai("a", TEXT | {"max_tokens": 1}))
    response = run("hf:acme/model", source, progress=False)["a"]["response"]
    assert response["body"]["model"] == "acme/model"
    assert hub.requests.count("GET /api/models/acme/model") == 1


def test_tables_elsewhere_are_not_looked_for_here(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(DEMO, bundle, ignore=shutil.ignore_patterns("c"))  # the shards of each array
    with pytest.raises(BundleError):
        split({}, bundle=bundle)
    assert split({"tables": str(DEMO / TABLES)}, bundle=bundle)[0]["sequences"] > 0


def test_http_and_clusters_are_not_imported() -> None:
    absent = "starlette", "anyio", "uvicorn", "httptools", "prometheus_client", "ray", "pyarrow"
    code = f"import sys, stem_edge; stem_edge.batch; print([*{{*{absent}}} & {{*sys.modules}}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
