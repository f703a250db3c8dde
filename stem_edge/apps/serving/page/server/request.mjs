/** Requests for an answer, and the chunks of its stream. */

import { contentOf } from "../data/files.mjs";

const LONGEST = 1024; // tokens, because completions end after 16 if nothing is said

/** Return {path, body} of the request for an answer to `messages`, given from the first one on. */
export function requestFor(messages, system, sampling, hasTemplate) {
  const shared = { ...sampling, stream: true, timings_per_token: true };
  if (hasTemplate) {
    const body = { messages: chatMessages(messages, system), ...shared };
    return { path: "v1/chat/completions", body };
  }
  const body = { prompt: continuedText(messages), max_tokens: LONGEST, ...shared };
  return { path: "v1/completions", body };
}

function chatMessages(messages, system) {
  const chat = system.trim() ? [{ role: "system", content: system }] : [];
  for (const message of messages) {
    const content = contentOf(message);
    const last = chat.at(-1);
    // Join two user messages in a row, which a failed answer leaves: many templates refuse them.
    if (last?.role === message.role) last.content += `\n\n${content}`;
    else if (content) chat.push({ role: message.role, content, ...thoughtsOf(message) });
  }
  return chat;
}

/** The reasoning before an answer; the chat template decides whether the model sees it again. */
function thoughtsOf({ thoughts }) {
  return thoughts ? { reasoning_content: thoughts } : {};
}

/** The whole text so far, which a model without a chat template continues. */
function continuedText(messages) {
  let text = "";
  for (const message of messages) {
    // A user's text begins on a new line, because nothing else separates it from the answer.
    const joint = text && message.role === "user" && !text.endsWith("\n") ? "\n" : "";
    text += joint + contentOf(message);
  }
  return text;
}

/** Return {text, thoughts, timings, finish} of a chunk of a chat or a completion. */
export function readChunk(chunk) {
  const choice = chunk.choices?.[0];
  return {
    text: choice?.delta?.content ?? choice?.text ?? "",
    thoughts: choice?.delta?.reasoning_content ?? "",
    timings: chunk.timings ?? null,
    finish: choice?.finish_reason ?? null,
  };
}
