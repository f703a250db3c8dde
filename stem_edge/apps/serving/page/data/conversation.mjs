/**
 * A conversation is a tree of messages: an edit or a retry adds a sibling, and nothing is lost.
 * `chosen`: message id ("" for the beginning) -> id of the following message that is shown.
 */

const TITLE_LENGTH = 60;

/** A unique id for a message or conversation. (randomUUID needs https or localhost.) */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** An empty conversation with a system prompt. */
export function newConversation(system, now) {
  return { id: newId(), title: "", system, created: now, changed: now, messages: {}, chosen: {} };
}

/** Add a message after `parent` (null: at the beginning) and show it; return it. */
export function addMessage(conversation, parent, fields, now) {
  const message = { id: newId(), parent, text: "", created: now, ...fields };
  conversation.messages[message.id] = message;
  conversation.chosen[parent ?? ""] = message.id;
  conversation.changed = now;
  if (!conversation.title && message.role === "user") conversation.title = titleOf(message);
  return message;
}

/** The messages that are shown, from the first to the last. */
export function shownPath(conversation) {
  const path = [];
  let next = conversation.messages[conversation.chosen[""]];
  while (next) {
    path.push(next);
    next = conversation.messages[conversation.chosen[next.id]];
  }
  return path;
}

/** The messages from the first to `message`. */
export function pathTo(conversation, message) {
  const path = [];
  for (let at = message; at; at = conversation.messages[at.parent]) path.unshift(at);
  return path;
}

/** All versions of a message, oldest first: messages with the same parent. */
export function versionsOf(conversation, message) {
  return Object.values(conversation.messages)
    .filter((other) => other.parent === message.parent)
    .sort((a, b) => a.created - b.created);
}

/** Show another version of a message, with the messages that followed it. */
export function choose(conversation, message) {
  conversation.chosen[message.parent ?? ""] = message.id;
}

/** True if a title or a message contains all words of a search. */
export function matches(conversation, search) {
  const texts = Object.values(conversation.messages).map((message) => message.text);
  const all = [conversation.title, ...texts].join("\n").toLowerCase();
  return search.toLowerCase().split(/\s+/).every((word) => all.includes(word));
}

function titleOf(message) {
  const line = message.text.trim().split("\n", 1)[0] || message.files?.[0]?.name || "";
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1).trimEnd()}…` : line;
}
