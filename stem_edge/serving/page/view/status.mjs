/** Whether the server answers: asked at first, after failures, and now and then while the page is seen. */

const OFTEN = 1500; // milliseconds, while the server loads or is gone
const SELDOM = 20_000;

const TEXTS = {
  loading: "The server is loading the model. This page goes on by itself.",
  gone: "The server cannot be reached. Conversations stay in this browser; the page tries again.",
};

export class Status extends EventTarget {
  #client;
  #banner;
  #timer = 0;

  /** Event "ready": the server answers (again); `props` are what it said then. */
  constructor(client, banner) {
    super();
    this.#client = client;
    this.#banner = banner;
    this.state = "unknown";
    this.props = null;
    document.addEventListener("visibilitychange", () => document.hidden || this.check());
  }

  /** Ask now, and again after a while. */
  async check() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    try {
      await this.#client.health();
      if (this.state !== "ready") await this.#arrive();
    } catch (error) {
      this.#show(error.kind, error.message);
    }
    clearTimeout(this.#timer); // of another check that began meanwhile
    const waits = this.state === "loading" || this.state === "gone";
    if (!document.hidden) this.#timer = setTimeout(() => this.check(), waits ? OFTEN : SELDOM);
  }

  async #arrive() {
    this.props = await this.#client.props();
    this.#show("ready", "");
    this.dispatchEvent(new Event("ready"));
  }

  #show(state, message) {
    if (state === this.state) return;
    const before = this.state;
    this.state = state;
    this.#banner.textContent = state === "ready" ? "" : (TEXTS[state] ?? message);
    this.#banner.className = state;
    if (state === "key" && before !== "key") this.dispatchEvent(new Event("key"));
  }
}
