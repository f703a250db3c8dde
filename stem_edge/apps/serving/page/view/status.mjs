/** Checks if the server is ready: at first, after failures, and regularly while the page is visible. */

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
  #asked = 0;
  #told = 0; // number of the latest check whose result was used

  /** Events: "ready" (the server answers again; `props` has its properties), "key" (it needs a key). */
  constructor(client, banner) {
    super();
    this.#client = client;
    this.#banner = banner;
    this.state = "unknown";
    this.props = null;
    document.addEventListener("visibilitychange", () => document.hidden || this.check());
  }

  /** Check now, and again later. The result of an older check never replaces that of a newer one. */
  async check() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    const number = ++this.#asked;
    const found = await this.#ask();
    if (number > this.#told) {
      this.#told = number;
      this.#tell(found);
    }
    clearTimeout(this.#timer); // of another check that began meanwhile
    const waits = this.state === "loading" || this.state === "gone";
    if (!document.hidden) this.#timer = setTimeout(() => this.check(), waits ? OFTEN : SELDOM);
  }

  async #ask() {
    try {
      await this.#client.health();
      const props = this.state === "ready" ? this.props : await this.#client.props();
      return { state: "ready", message: "", props };
    } catch (error) {
      return { state: error.kind, message: error.message, props: this.props };
    }
  }

  #tell({ state, message, props }) {
    if (state === this.state) return;
    this.state = state;
    this.props = props;
    this.#banner.textContent = state === "ready" ? "" : (TEXTS[state] ?? message);
    this.#banner.className = state;
    if (state === "key" || state === "ready") this.dispatchEvent(new Event(state));
  }
}
