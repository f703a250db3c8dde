"""The npm package `openai`: another client, with its own reader of streams."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from servers import serving

import stem_edge
from stem_edge.serving import app

pytestmark = pytest.mark.slow
PACKAGE = "openai@6"
PROGRAM = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none" });
const messages = [{ role: "user", content: "Hello" }];
const asked = { model: "m", messages, max_tokens: 12, temperature: 0 };
const whole = await client.chat.completions.create(asked);
let text = "", reason = null;
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
  reason = chunk.choices[0]?.finish_reason ?? reason;
}
const parameters = {
  type: "object", properties: { place: { enum: ["Paris", "Rome"] } }, required: ["place"],
  additionalProperties: false };
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const runner = client.chat.completions.stream(
  { ...asked, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 100 });
const call = (await runner.finalChatCompletion()).choices[0];
console.log(JSON.stringify({
  whole: whole.choices[0].message.content, text, reason,
  call: call.message.tool_calls[0].function, callReason: call.finish_reason }));
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, beside the package."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("npm")
    install = [npm, "install", "--silent", "--no-audit", "--no-fund", PACKAGE]
    if subprocess.run(install, cwd=folder, check=False, capture_output=True).returncode:
        pytest.skip(f"{PACKAGE} cannot be installed")
    (folder / "program.mjs").write_text(PROGRAM)
    return folder / "program.mjs"


def test_chats_streams_and_tools(program: Path, chat_bundle: Path) -> None:
    with stem_edge.load(chat_bundle) as model, serving(app(model, name="m")) as url:
        command = ["node", program.name, url]
        done = subprocess.run(
            command, cwd=program.parent, check=False, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["whole"] == found["text"] != ""
    assert found["reason"] == "length"
    assert found["callReason"] == "tool_calls"
    assert found["call"]["name"] == "weather"
    assert json.loads(found["call"]["arguments"])["place"] in ("Paris", "Rome")
