/** Client of the server: knows its address and key; all failures become a ServerError. */

import { eventsOf } from "./sse.mjs";

/** kind: "key" (401), "loading" (503), "busy" (429), "gone" (no connection), "refused" (the rest). */
export class ServerError extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

const KINDS = { 401: "key", 429: "busy", 503: "loading" };
const KEY = "stem-edge.key";

export class Client {
  #base;

  /** base: address of the page, to which the server's paths are relative. */
  constructor(base) {
    this.#base = base;
  }

  /** The key that the user gave; forgotten when the tab is closed. */
  set key(value) {
    sessionStorage.setItem(KEY, value);
  }

  /** Return properties of the server and its model (/props). */
  async props() {
    return (await this.#request("props")).json();
  }

  /** Return whether the server is ready; raises ServerError if it is loading or gone. */
  async health() {
    await this.#request("health");
  }

  /** Yield the objects of a stream until it ends. Raises ServerError, or AbortError after a stop. */
  async *stream(path, body, signal) {
    const response = await this.#request(path, {
      method: "POST",
      body: JSON.stringify(body),
      headers: { "Content-Type": "application/json" },
      signal,
    });
    try {
      for await (const data of eventsOf(response.body)) yield checked(JSON.parse(data));
    } catch (error) {
      if (error instanceof ServerError || error.name === "AbortError") throw error;
      throw new ServerError("gone", "The connection broke before the answer was finished.");
    }
  }

  async #request(path, options = {}) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
    const url = new URL(path, this.#base);
    let response;
    try {
      response = await fetch(url, { ...options, headers, cache: "no-store", redirect: "error" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("gone", "The server cannot be reached.");
    }
    if (response.ok) return response;
    throw new ServerError(KINDS[response.status] ?? "refused", await reasonOf(response));
  }
}

function checked(chunk) {
  if (chunk.error) throw new ServerError("refused", messageOf(chunk.error));
  return chunk;
}

async function reasonOf(response) {
  const said = await response.json().catch(() => null);
  const reason = said?.error ? messageOf(said.error) : `The server answered ${response.status}.`;
  const wait = response.headers.get("Retry-After");
  return wait ? `${reason} Try again in ${wait} s.` : reason;
}

function messageOf(error) {
  return typeof error === "string" ? error : (error.message ?? "The server gave no reason.");
}
