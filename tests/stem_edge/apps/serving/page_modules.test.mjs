/** Modules of the page that need no browser; run by test_page_modules.py. */

import assert from "node:assert/strict";
import { test } from "node:test";

const page = new URL("../../../../stem_edge/apps/serving/page/", import.meta.url);
const load = (path) => import(new URL(path, page));
const { EventParser } = await load("server/sse.mjs");
const { addMessage, choose, newConversation, pathTo, shownPath, versionsOf } = await load("data/conversation.mjs");
const { figuresOf, formatSize } = await load("data/figures.mjs");
const { readChunk, requestFor } = await load("server/request.mjs");
const { fromJson, toJson } = await load("data/transfer.mjs");
const { Status } = await load("view/status.mjs");

test("events are the same wherever the stream is cut", () => {
  for (const end of ["\n", "\r\n", "\r"]) {
    const lines = [": keepalive", "data: one", "", "event: x", "data:two", "data:  three", "", "data: lost"];
    const stream = lines.join(end) + end;
    for (let cut = 0; cut <= stream.length; cut++) {
      const parser = new EventParser();
      const events = [...parser.push(stream.slice(0, cut)), ...parser.push(stream.slice(cut))];
      assert.deepEqual(events, ["one", "two\n three"]);
    }
  }
});

test("versions of messages are branches of a tree", () => {
  const conversation = newConversation("", 0);
  const one = addMessage(conversation, null, { role: "user", text: "one" }, 1);
  const first = addMessage(conversation, one.id, { role: "assistant" }, 2);
  const after = addMessage(conversation, first.id, { role: "user" }, 3);
  const second = addMessage(conversation, one.id, { role: "assistant" }, 4);
  assert.deepEqual(shownPath(conversation), [one, second]);
  choose(conversation, first);
  assert.deepEqual(shownPath(conversation), [one, first, after]);
  assert.deepEqual(versionsOf(conversation, second), [first, second]);
  assert.deepEqual(pathTo(conversation, second), [one, second]);
  assert.equal(conversation.title, "one");
});

test("an answer that failed leaves no gap in what is sent", () => {
  const files = [{ name: "a.txt", text: "``" }];
  const said = [["user", "one"], ["assistant", ""], ["user", "two"], ["assistant", "three"]];
  const messages = said.map(([role, text]) => ({ role, text }));
  const { body } = requestFor([...messages, { role: "user", text: "", files }], "S", { seed: 1 }, true);
  assert.deepEqual(body.messages.map(({ content }) => content),
    ["S", "one\n\ntwo", "three", "File a.txt:\n```\n``\n```\n\n"]);
  assert.equal(body.seed, 1);
});

test("thoughts are kept, and sent beside their answer", () => {
  const delta = { reasoning_content: "Hm." };
  assert.equal(readChunk({ choices: [{ delta }] }).thoughts, "Hm.");
  const conversation = newConversation("", 0);
  const one = addMessage(conversation, null, { role: "user", text: "one" }, 1);
  addMessage(conversation, one.id, { role: "assistant", text: "two", thoughts: "Hm." }, 1);
  const { body } = requestFor(shownPath(fromJson(toJson(conversation))), "", {}, true);
  assert.deepEqual(body.messages,
    [{ role: "user", content: "one" }, { role: "assistant", content: "two", reasoning_content: "Hm." }]);
});

test("conversations with circles or gaps are not imported", () => {
  const conversation = newConversation("s", 0);
  const one = addMessage(conversation, null, { role: "user", text: "one" }, 1);
  const two = addMessage(conversation, one.id, { role: "assistant" }, 1);
  assert.deepEqual(shownPath(fromJson(toJson(conversation))).map(({ id }) => id), [one.id, two.id]);
  conversation.chosen[two.id] = one.id; // what is shown would never end
  assert.equal(shownPath(fromJson(toJson(conversation))).length, 2);
  one.parent = two.id;
  assert.throws(() => fromJson(toJson(conversation)), /not before it/);
  assert.throws(() => fromJson("{"), /not JSON/);
  assert.throws(() => fromJson("{}"), /format/);
});

test("figures are those of models with and without rows", () => {
  const dense = { prompt_n: 1, cache_n: 1200, prompt_per_second: null, predicted_n: 1, predicted_per_second: 9.876 };
  assert.deepEqual(figuresOf(dense).map(({ value, more }) => `${value} ${more}`),
    ["9.88 tok/s 1 token", "– 1 token, 1,200 cached"]);
  const rows = { ...dense, row_hits: 3, row_misses: 1, flash_bytes: 4000, memory_bytes: 999.6e6, memory_limit: null };
  assert.deepEqual(figuresOf(rows).slice(2).map(({ value, more }) => `${value} ${more}`),
    ["75 % ", "4 kB 1 kB a token", "1 GB "]);
  assert.equal(formatSize(0), "0 B");
});

test("a question asked before the key was given does not ask for it again", async () => {
  globalThis.document = Object.assign(new EventTarget(), { hidden: true }); // so that no timer starts
  const said = []; // settles what the server says to each request for props
  const client = { health: async () => {}, props: () => new Promise((...settle) => said.push(settle)) };
  const status = new Status(client, {});
  const events = [];
  for (const type of ["key", "ready"]) status.addEventListener(type, () => events.push(type));
  const refused = Object.assign(new Error("no key"), { kind: "key" });
  const checks = [status.check(), status.check(), status.check()];
  await new Promise(setImmediate);
  said[0][1](refused);
  await checks[0];
  said[2][0]({ model: "m" });
  await checks[2];
  said[1][1](refused);
  await checks[1];
  assert.deepEqual([status.state, status.props, events], ["ready", { model: "m" }, ["key", "ready"]]);
});
