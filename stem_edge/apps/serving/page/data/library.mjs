/** All conversations of this browser: held in memory, and saved in IndexedDB when they change. */

const DATABASE = "stem-edge";
const STORE = "conversations";

export class Library extends EventTarget {
  // A promise, because a message may be sent before the database is open; null if there is none.
  #database = opened().catch(() => null);
  #all = new Map();
  #others = new BroadcastChannel(DATABASE); // the same page in other tabs

  /** Read the saved conversations; return false if the browser saves nothing (private windows). */
  async open() {
    this.#others.onmessage = ({ data: id }) => this.#reread(id);
    const database = await this.#database;
    if (!database) return false;
    for (const kept of await settled(storeOf(database, "readonly").getAll())) {
      if (!this.#all.has(kept.id)) this.#all.set(kept.id, interrupted(kept));
    }
    return true;
  }

  /** All conversations, the latest change first. */
  list() {
    return [...this.#all.values()].sort((a, b) => b.changed - a.changed);
  }

  get(id) {
    return this.#all.get(id) ?? null;
  }

  /**
   * Save a conversation as it is now. Events: "change" (of the list or a title), and "unkept" (the
   * browser did not save it, often because its storage is full; detail: the reason).
   */
  async save(conversation) {
    this.#all.set(conversation.id, conversation);
    this.dispatchEvent(new Event("change"));
    await this.#write(conversation.id, (store) => store.put(conversation));
  }

  async remove(conversation) {
    this.#all.delete(conversation.id);
    this.dispatchEvent(new Event("change"));
    await this.#write(conversation.id, (store) => store.delete(conversation.id));
  }

  async #write(id, change) {
    const database = await this.#database;
    if (!database) return;
    try {
      await settled(change(storeOf(database, "readwrite")));
      this.#others.postMessage(id);
    } catch (error) {
      this.dispatchEvent(new CustomEvent("unkept", { detail: error.message }));
    }
  }

  /** Load a conversation that another tab saved. Event "replace"; detail: the conversation's id. */
  async #reread(id) {
    const conversation = await settled(storeOf(await this.#database, "readonly").get(id));
    if (conversation) this.#all.set(id, conversation);
    else this.#all.delete(id);
    this.dispatchEvent(new CustomEvent("replace", { detail: id }));
    this.dispatchEvent(new Event("change"));
  }
}

function storeOf(database, mode) {
  return database.transaction(STORE, mode).objectStore(STORE);
}

/** Mark an answer that was running when the page was closed as stopped. */
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
