/** The list of conversations: newest first, grouped by day, with a search. */

import { matches } from "../data/conversation.mjs";
import { h } from "./dom.mjs";

const DAY = 86_400_000;

export class Sidebar {
  #list;
  #search;
  #library;
  #answers;
  #open;

  /** open(conversation): shows it; answers: Answers, which knows the running ones. */
  constructor(element, library, answers, open) {
    this.#list = element.querySelector("#conversations");
    this.#search = element.querySelector("#search");
    this.#library = library;
    this.#answers = answers;
    this.#open = open;
    this.#search.addEventListener("input", () => this.show());
  }

  /** Show the conversations; `current` is marked. */
  show(current = this.current) {
    this.current = current;
    const words = this.#search.value.trim();
    const found = this.#library.list().filter((each) => !words || matches(each, words));
    const items = found.length ? this.#groups(found) : [h("p", { class: "quiet" }, nothing(words))];
    const focused = this.#list.contains(document.activeElement) && document.activeElement.dataset.id;
    this.#list.replaceChildren(...items);
    if (focused) this.#list.querySelector(`[data-id="${focused}"]`)?.focus();
  }

  #groups(conversations) {
    const groups = new Map();
    for (const conversation of conversations) {
      const name = dayOf(conversation.changed);
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push(this.#item(conversation));
    }
    return [...groups].map(([name, items]) => h("section", { "aria-label": name }, h("h2", {}, name), h("ul", {}, ...items)));
  }

  #item(conversation) {
    const isCurrent = conversation.id === this.current?.id;
    const writes = this.#answers.runs(conversation);
    const title = h("span", {}, conversation.title || "New conversation");
    const sign = writes && h("span", { class: "pulse", role: "img", "aria-label": "Answer is being written" });
    const shared = { type: "button", "data-id": conversation.id, "aria-current": isCurrent ? "page" : null };
    return h("li", {}, h("button", { ...shared, onclick: () => this.#open(conversation) }, title, sign));
  }
}

function nothing(words) {
  return words ? "No conversation has these words." : "Conversations are kept here, in this browser only.";
}

function dayOf(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY) return "Yesterday";
  if (time >= midnight - 7 * DAY) return "Last 7 days";
  return "Earlier";
}
