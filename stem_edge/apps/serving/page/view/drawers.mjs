/** The list on the left and the metrics on the right: beside the chat, or over it in a narrow window. */

/** A side panel. In a wide window, the browser remembers if the user has closed it. */
export class Drawer {
  #side;
  #button;
  #wide;
  #shade = document.querySelector("#shade");
  #main = document.querySelector("main");

  /** side: the panel; button: shows it; width: window width in pixels from which it is beside the chat. */
  constructor(side, button, width) {
    this.#side = side;
    this.#button = button;
    this.#wide = matchMedia(`(min-width: ${width}px)`);
    button.addEventListener("click", () => this.toggle());
    side.querySelector(".close").addEventListener("click", () => this.toggle());
    this.#shade.addEventListener("click", () => this.leave());
    side.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.leave()) event.stopPropagation();
    });
    this.#wide.addEventListener("change", () => this.#begin());
    this.#begin();
  }

  toggle() {
    const shown = this.#side.hidden;
    if (this.#wide.matches) localStorage.setItem(this.#key, shown ? "open" : "closed");
    this.#set(shown);
    if (!this.#wide.matches) (shown ? this.#side.querySelector(".close") : this.#button).focus();
  }

  /** Close the panel if it covers the chat; return whether it did. */
  leave() {
    if (this.#wide.matches || this.#side.hidden) return false;
    this.#set(false);
    this.#button.focus();
    return true;
  }

  get #key() {
    return `stem-edge.${this.#side.id}`;
  }

  #begin() {
    this.#set(this.#wide.matches && localStorage.getItem(this.#key) !== "closed");
  }

  #set(shown) {
    this.#side.hidden = !shown;
    this.#button.setAttribute("aria-expanded", String(shown));
    const over = shown && !this.#wide.matches;
    this.#shade.hidden = !over;
    this.#main.inert = over;
  }
}
