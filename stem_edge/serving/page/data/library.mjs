/** The conversations of this browser: all in memory, each kept in IndexedDB when it changes. */

const DATABASE = "stem-edge";
const STORE = "conversations";

export class Library extends EventTarget {
  #database = null;
  #all = new Map();

  /** Read what is kept. Without IndexedDB (some private windows) nothing is; see `keeps`. */
  async open() {
    try {
      this.#database = await opened();
      const kept = await settled(this.#store("readonly").getAll());
      for (const conversation of kept) this.#all.set(conversation.id, interrupted(conversation));
    } catch {
      this.#database = null;
    }
  }

  /** Whether conversations are there on the next visit. */
  get keeps() {
    return this.#database !== null;
  }

  /** Every conversation, the last changed one first. */
  list() {
    return [...this.#all.values()].sort((a, b) => b.changed - a.changed);
  }

  get(id) {
    return this.#all.get(id) ?? null;
  }

  /** Keep a conversation as it is now, and say that something changed. */
  async save(conversation) {
    this.#all.set(conversation.id, conversation);
    this.dispatchEvent(new Event("change"));
    if (this.#database) await settled(this.#store("readwrite").put(conversation));
  }

  async remove(conversation) {
    this.#all.delete(conversation.id);
    this.dispatchEvent(new Event("change"));
    if (this.#database) await settled(this.#store("readwrite").delete(conversation.id));
  }

  #store(mode) {
    return this.#database.transaction(STORE, mode).objectStore(STORE);
  }
}

/** An answer that was being written when the page was left has ended there. */
function interrupted(conversation) {
  for (const message of Object.values(conversation.messages)) {
    if (message.state === "running") message.state = "stopped";
  }
  return conversation;
}

function opened() {
  const request = indexedDB.open(DATABASE, 1);
  request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
  return settled(request);
}

function settled(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
