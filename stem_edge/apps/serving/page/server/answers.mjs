/** Answers that are being generated, at most one in each conversation. */

import { addSample } from "../data/figures.mjs";
import { readChunk } from "./request.mjs";

const KEEP_EVERY = 2000; // milliseconds; a reload loses at most this much of an answer

export class Answers extends EventTarget {
  #client;
  #library;
  #running = new Map(); // conversation's id -> what stops its answer

  constructor(client, library) {
    super();
    this.#client = client;
    this.#library = library;
  }

  runs(conversation) {
    return this.#running.has(conversation.id);
  }

  /** Stop the running answer of a conversation, if any; closing the connection tells the server. */
  stop(conversation) {
    this.#running.get(conversation.id)?.abort();
  }

  /**
   * Write the answer to `request` into `message` until it ends, and save the conversation.
   * Events: "progress", and at the end "end"; detail: {conversation, message, error}.
   */
  async write(conversation, message, request) {
    const stop = new AbortController();
    this.#running.set(conversation.id, stop);
    Object.assign(message, { state: "running", samples: [] });
    let error = null;
    try {
      await this.#read(conversation, message, request, stop.signal);
    } catch (failure) {
      error = failure;
      message.state = failure.name === "AbortError" ? "stopped" : "failed";
      message.note = failure.name === "AbortError" ? "" : failure.message;
    }
    if (this.#running.get(conversation.id) === stop) this.#running.delete(conversation.id);
    conversation.changed = Date.now();
    // Do not save a conversation that the user has deleted meanwhile.
    if (this.#library.get(conversation.id)) await this.#library.save(conversation);
    this.#say("end", { conversation, message, error });
  }

  async #read(conversation, message, { path, body }, signal) {
    let kept = performance.now();
    let finish = null;
    for await (const chunk of this.#client.stream(path, body, signal)) {
      const now = performance.now();
      finish = readInto(message, chunk) ?? finish;
      if (now - kept > KEEP_EVERY && this.#library.get(conversation.id)) {
        kept = now;
        this.#library.save(conversation);
      }
      this.#say("progress", { conversation, message });
    }
    if (!finish) throw new Error("The connection ended before the answer was finished.");
    message.state = finish === "length" ? "cut" : "done";
  }

  #say(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}

/** Add a chunk to a message; return its finish reason, if any. */
function readInto(message, chunk) {
  const { text, thoughts, timings, finish } = readChunk(chunk);
  message.text += text;
  if (thoughts) message.thoughts = (message.thoughts ?? "") + thoughts;
  if (timings) {
    message.timings = timings;
    addSample(message.samples, timings);
  }
  return finish;
}
