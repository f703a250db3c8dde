"""Pushing to a hub of our own: what is fetched again has the same bytes, and others' files stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hub_server import Blob, HubServer
from manifests import make_bundle

from stem_edge.bundle.manifest import (
    GGUF,
    MANIFEST,
    TABLES,
    TOKEN_COUNTS,
    encode_manifest,
    open_manifest,
)
from stem_edge.bundle.opening import open_bundle
from stem_edge.bundle.push import CARD, OWN_CARD, model_card, push
from stem_edge.commands.main import main
from stem_edge.errors import BundleError, HubError, InputError
from stem_edge.hub.asking import asking
from stem_edge.hub.names import HubName

NAME = "acme/pushed"
SHARD = f"{TABLES}/records/c/0/0"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle that opens, but does not run."""
    return make_bundle(tmp_path / "bundle")


def there(hub: HubServer, ref: str = "main") -> dict[str, Blob]:
    """Files of the model on the hub."""
    model = hub.models[NAME]
    return model.commits[model.refs[ref]]


def text_of(blob: Blob) -> str:
    return b"".join(blob.pieces(0)).decode()


def test_what_was_pushed_is_fetched(
    hub: HubServer, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--private", "--license", "mit", "--base-model", "acme/base"]
    assert main(["push", str(bundle), NAME, *options, "--json"]) == 0
    out, err = capsys.readouterr()
    name = json.loads(out)["name"]
    assert name == f"hf:{NAME}@{hub.models[NAME].refs['main']}" and err == ""
    assert hub.models[NAME].private
    assert len(hub.asked("/commit/main")) == 1
    path = open_bundle(name).path
    for file in (MANIFEST, *open_manifest(bundle).files):
        assert (path / file).read_bytes() == (bundle / file).read_bytes()
    assert not (path / CARD).exists()
    card = text_of(there(hub)[CARD])
    expected = (
        'library_name: "stem-edge"',
        'license: "mit"',
        'base_model: "acme/base"',
        f"hf:{NAME}",
    )
    assert all(part in card for part in expected)
    hub.requests.clear()
    assert main(["push", str(bundle), NAME, *options]) == 0
    assert capsys.readouterr().err == f"stem-edge: hf:{NAME} has all of it already\n"
    assert push(bundle, f"hf:{NAME}", license="mit", base_model="acme/base", progress=False) == name
    assert not hub.asked("PUT") and not hub.asked("/commit/")


def test_what_is_private_is_not_published(hub: HubServer, bundle: Path) -> None:
    push(bundle, NAME)
    with pytest.raises(InputError, match=r"is public.*--private"):
        push(bundle, NAME, private=True)
    hub.models[NAME].private = True
    push(bundle, NAME, private=True)


def test_a_push_goes_on_where_it_was_cut_off(hub: HubServer, bundle: Path) -> None:
    hub.faults.status["/commit/"] = 400
    with pytest.raises(HubError, match=r"hf:acme/pushed: the hub answers 400 \(something is wrong"):
        push(bundle, NAME)
    sent = len(hub.asked("PUT"))
    assert sent and there(hub).keys() == {".gitattributes"}  # nobody sees half of it
    hub.faults.status.clear()
    push(bundle, NAME)
    assert len(hub.asked("PUT")) == sent
    assert there(hub).keys() > {MANIFEST, CARD, SHARD}


def test_a_new_bundle_replaces_the_old_one_and_nothing_else(hub: HubServer, bundle: Path) -> None:
    push(bundle, NAME)
    old = {f"{TABLES}/records/c/9/0", GGUF, TOKEN_COUNTS}
    others = {"notes.md", "images/a.png"}
    files = there(hub) | {file: Blob(b"data") for file in old | others}
    files[CARD] = Blob(b"my own words")
    hub.models[NAME].commit(files)
    push(bundle, NAME)
    assert not old & there(hub).keys()
    assert others < there(hub).keys()
    assert text_of(there(hub)[CARD]) == "my own words"
    hub.models[NAME].commit(there(hub) | {CARD: Blob(f"old {OWN_CARD}".encode())})
    push(bundle, NAME)
    assert text_of(there(hub)[CARD]) == model_card(open_manifest(bundle), NAME)


def test_a_branch_is_made(hub: HubServer, bundle: Path) -> None:
    push(bundle, NAME, revision="int4")
    assert MANIFEST in there(hub, "int4") and MANIFEST not in there(hub)
    assert open_bundle(f"hf:{NAME}@int4").path.name == hub.models[NAME].refs["int4"]
    with pytest.raises(InputError, match="give the revision once"):
        push(bundle, f"{NAME}@a", revision="b")
    with pytest.raises(InputError, match="expected hf:org/name"):
        push(bundle, "name")


def test_damage_is_not_spread(hub: HubServer, bundle: Path) -> None:
    data = (bundle / SHARD).read_bytes()
    (bundle / SHARD).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(BundleError, match=f"{SHARD}: sha256"):
        push(bundle, NAME)
    assert not hub.requests


@pytest.mark.parametrize(
    ("place", "status", "part"),
    [
        ("/api/repos/create", 403, "answers 403"),
        ("/api/repos/create", 503, "try later"),
        ("/objects/", 403, r"answers 403 \(something is wrong here"),  # in a thread of the library
    ],
)
def test_what_the_hub_refuses_is_told(
    hub: HubServer, bundle: Path, place: str, status: int, part: str
) -> None:
    hub.faults.status[place] = status
    with pytest.raises(HubError, match=part):
        push(bundle, NAME)


@pytest.mark.parametrize(
    "option", [{"license": "Apache 2"}, {"license": ""}, {"base_model": "base"}]
)
def test_what_belongs_in_no_card_is_refused(bundle: Path, option: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"license is .*apache-2.0|base_model is .*org/name"):
        push(bundle, NAME, **option)


def test_a_push_without_a_token(
    hub: HubServer, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nowhere")
    hub.faults.status["/api/repos/create"] = 401
    with pytest.raises(HubError, match="none is set; log in with: hf auth login"):
        push(bundle, NAME)


def test_a_hub_without_xet() -> None:
    failed = OSError("HTTP status 404 for http://hub/api/models/a/b/xet-write-token/main")
    with pytest.raises(HubError, match="HF_HUB_DISABLE_XET=1"), asking(HubName("a/b")):
        raise failed


def test_a_card_says_what_is_known(bundle: Path) -> None:
    manifest = open_manifest(bundle)
    card = model_card(manifest, NAME)
    assert "license" not in card and "base_model" not in card and "made from" not in card
    report = msgspec.structs.replace(manifest.report, agreement=0.987, divergence_99=0.5)
    manifest = msgspec.structs.replace(manifest, reports={"onnxruntime": report})
    assert encode_manifest(manifest)
    card = model_card(manifest, NAME, license='a "b"\nc')
    assert "98.7% of positions" in card and "99th percentile of the divergence: 0.5 nats" in card
    assert 'license: "a \\"b\\"\\nc"' in card
    assert card.startswith("---\n") and card.index("\n---\n") < card.index(OWN_CARD)
