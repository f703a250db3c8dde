/** What is sent for an answer, and what comes back in each chunk of its stream. */

import { contentOf } from "../data/files.mjs";

const LONGEST = 1024; // tokens, because completions end after 16 if nothing is said

/** Return {path, body} that ask for the answer to `messages`, the path from the first message on. */
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
    // Many templates refuse two messages of a user after each other, which an answer that failed leaves.
    if (last?.role === message.role) last.content += `\n\n${content}`;
    else if (content) chat.push({ role: message.role, content, ...thoughtsOf(message) });
  }
  return chat;
}

/** The thoughts before an answer, which the template shows the model again or leaves out. */
function thoughtsOf({ thoughts }) {
  return thoughts ? { reasoning_content: thoughts } : {};
}

/** The whole text so far; a model without a chat template only ever goes on with it. */
function continuedText(messages) {
  let text = "";
  for (const message of messages) {
    // What a user adds to an answer begins a line, because nothing else tells the two apart.
    const joint = text && message.role === "user" && !text.endsWith("\n") ? "\n" : "";
    text += joint + contentOf(message);
  }
  return text;
}

/** Return {text, thoughts, timings, finish} of a chunk of either kind of stream. */
export function readChunk(chunk) {
  const choice = chunk.choices?.[0];
  return {
    text: choice?.delta?.content ?? choice?.text ?? "",
    thoughts: choice?.delta?.reasoning_content ?? "",
    timings: chunk.timings ?? null,
    finish: choice?.finish_reason ?? null,
  };
}
