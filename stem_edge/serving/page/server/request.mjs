/** What is sent for an answer, and what comes back in each chunk of its stream. */

import { contentOf } from "../data/files.mjs";

/** Return {path, body} that ask for the answer to `messages`, the path from the first message on. */
export function requestFor(messages, system, sampling, hasTemplate) {
  const shared = { ...sampling, stream: true, timings_per_token: true };
  if (hasTemplate) {
    const body = { messages: chatMessages(messages, system), ...shared };
    return { path: "v1/chat/completions", body };
  }
  return { path: "v1/completions", body: { prompt: continuedText(messages), ...shared } };
}

function chatMessages(messages, system) {
  const head = system.trim() ? [{ role: "system", content: system }] : [];
  return [...head, ...messages.map((message) => ({ role: message.role, content: contentOf(message) }))];
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

/** Return {text, timings, finish} of a chunk of either kind of stream. */
export function readChunk(chunk) {
  const choice = chunk.choices?.[0];
  return {
    text: choice?.delta?.content ?? choice?.text ?? "",
    timings: chunk.timings ?? null,
    finish: choice?.finish_reason ?? null,
  };
}
