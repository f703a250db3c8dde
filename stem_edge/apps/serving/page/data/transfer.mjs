/** Conversations as files: Markdown to read, JSON to import again. */

import { newId, shownPath } from "./conversation.mjs";
import { contentOf } from "./files.mjs";

const FORMAT = "stem-edge conversation 1";

/** The shown messages of a conversation, as Markdown. */
export function toMarkdown(conversation) {
  const parts = [`# ${conversation.title || "Conversation"}`];
  if (conversation.system.trim()) parts.push("## System prompt", conversation.system);
  for (const message of shownPath(conversation)) {
    parts.push(message.role === "user" ? "## You" : "## Answer", contentOf(message).trim());
  }
  return `${parts.join("\n\n")}\n`;
}

/** A whole conversation as JSON: all versions of its messages, with their metrics. */
export function toJson(conversation) {
  return `${JSON.stringify({ format: FORMAT, ...conversation }, null, 1)}\n`;
}

/** Parse the result of toJson to a new conversation. Raises Error that says what is wrong. */
export function fromJson(text) {
  const read = parsed(text);
  if (read?.format !== FORMAT) throw new Error(`This file does not say "format": "${FORMAT}".`);
  const { title, system, created, changed } = read;
  if (![title, system].every(isString) || ![created, changed].every(Number.isFinite)) {
    throw new Error("The conversation's title, system prompt or times are missing.");
  }
  const messages = {};
  for (const [id, message] of entries(read.messages)) {
    messages[id] = checkedMessage(id, message, messages);
  }
  const follows = ([from, to]) => messages[to] && messages[to].parent === (from || null);
  const chosen = Object.fromEntries(entries(read.chosen).filter(follows));
  return { id: newId(), title, system, created, changed, messages, chosen };
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
}

function checkedMessage(id, read, earlier) {
  const { parent, role, text, created, files = [], state = "done", plain = false, thoughts = "" } = read ?? {};
  const known = ["user", "assistant"].includes(role) && [text, thoughts].every(isString) && Number.isFinite(created);
  const named = Array.isArray(files) && files.every((file) => isString(file?.name) && isString(file.text));
  if (read?.id !== id || !known || !named) throw new Error(`Message ${id} is not whole.`);
  // The parent must be an earlier message, so that there is no cycle.
  if (parent !== null && !Object.hasOwn(earlier, parent)) {
    throw new Error(`Message ${id} follows one that is not before it.`);
  }
  return { id, parent, role, text, created, files, state, plain, thoughts, ...figuresIn(read) };
}

/** Return the metrics of a message, or none if a number is missing that this page shows. */
function figuresIn({ timings, samples = [] }) {
  const names = ["prompt_n", "prompt_per_second", "predicted_n", "predicted_per_second"];
  if (!names.every((name) => Number.isFinite(timings?.[name]))) return {};
  const numbers = Object.entries(timings).filter(([, value]) => Number.isFinite(value));
  const whole = Array.isArray(samples) && samples.every((sample) => Array.isArray(sample) && sample[0] >= 0);
  return { timings: Object.fromEntries(numbers), samples: whole ? samples : [] };
}

function entries(value) {
  if (typeof value !== "object" || value === null) throw new Error("The conversation has no messages.");
  return Object.entries(value);
}

function isString(value) {
  return typeof value === "string";
}
