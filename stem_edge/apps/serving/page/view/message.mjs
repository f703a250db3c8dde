/** One message: its text, its metrics, and its buttons. */

import { figuresOf } from "../data/figures.mjs";
import { copyFrom, h, iconButton } from "./dom.mjs";
import { MarkdownView } from "./markdown.mjs";

const NOTES = {
  stopped: "Stopped.",
  cut: "The answer reached its longest length or the end of the context.",
};

export class MessageView {
  #actions;
  #body = h("div", { class: "body" });
  #extra = h("div", { class: "extra" });
  #foot = h("div", { class: "foot" });
  #markdown = null;
  #thoughts = null;
  #isEdited = false; // what is being written must not be lost when an answer ends meanwhile

  /** actions: {retry(message), edit(message, text), choose(message)}. */
  constructor(message, actions) {
    this.message = message;
    this.#actions = actions;
    const name = message.role === "user" ? "You" : "Answer";
    const heading = h("h2", { class: "visually-hidden", id: `said-${message.id}` }, name);
    const shared = { class: `message ${message.role}`, "aria-labelledby": heading.id };
    this.element = h("article", shared, heading, this.#body, this.#extra, this.#foot);
  }

  /** Show the message as it is now, and which of its versions it is. */
  refresh(versions) {
    if (this.#isEdited) return;
    this.#showBody();
    this.#extra.replaceChildren(...this.#extras());
    this.#foot.replaceChildren(...this.#controls(versions));
    this.element.setAttribute("aria-busy", String(this.message.state === "running"));
  }

  /** Update the parts of an answer that change while it is generated. */
  progress() {
    this.#showBody();
    this.#extra.replaceChildren(...this.#extras());
  }

  #showBody() {
    const { role, plain, text, thoughts, files = [] } = this.message;
    if (role === "user") {
      const chips = files.map(({ name }) => h("li", { class: "chip" }, name));
      const list = files.length ? h("ul", { class: "chips", "aria-label": "Files" }, ...chips) : null;
      this.#body.replaceChildren(...[list, h("div", { class: "said" }, text)].filter(Boolean));
    } else if (plain) {
      this.#body.replaceChildren(h("div", { class: "said" }, text));
    } else {
      this.#showMarkdown(text, thoughts);
    }
  }

  #showMarkdown(text, thoughts) {
    if (!this.#markdown) {
      this.#markdown = new MarkdownView(h("div", { class: "markdown" }));
      this.#body.append(this.#markdown.element);
    }
    if (thoughts && !this.#thoughts) {
      this.#thoughts = new MarkdownView(h("div", { class: "markdown" }));
      this.#body.prepend(h("details", {}, h("summary", {}, "Thinking"), this.#thoughts.element));
    }
    this.#thoughts?.show(thoughts);
    this.#markdown.show(text);
  }

  #extras() {
    const { state, note, timings, text, thoughts, role, created } = this.message;
    const seconds = Math.round((Date.now() - created) / 1000);
    const said = note || NOTES[state];
    return [
      state === "running" && working(text ? "Writing" : thoughts ? "Thinking" : `Reading the prompt, ${seconds} s`),
      said && h("p", { class: `note ${state}` }, said),
      state === "done" && role === "assistant" && !text.trim() && h("p", { class: "note" }, "The answer is empty."),
      timings && figuresLine(timings),
    ].filter(Boolean);
  }

  #controls(versions) {
    const { message } = this;
    if (message.state === "running") return [];
    const copyButton = message.text && iconButton("copy", "Copy", () => copyFrom(copyButton, message.text));
    const change = message.role === "user"
      ? iconButton("edit", "Edit", () => this.#edit(versions), { "data-action": "edit" })
      : iconButton("retry", "Retry", () => this.#actions.retry(message), { "data-action": "retry" });
    return [this.#switcher(versions), copyButton, change].filter(Boolean);
  }

  #switcher(versions) {
    if (versions.length < 2) return null;
    const at = versions.indexOf(this.message);
    const go = (name, label, to) => iconButton(name, label, () => this.#actions.choose(versions[to], name),
      { "data-action": name, disabled: !versions[to] });
    return h("span", { class: "versions", role: "group", "aria-label": "Versions" },
      go("previous", "Previous version", at - 1),
      h("span", { "aria-label": `Version ${at + 1} of ${versions.length}`, role: "img" }, `${at + 1}/${versions.length}`),
      go("next", "Next version", at + 1));
  }

  #edit(versions) {
    const area = h("textarea", { "aria-label": "Edit your message" });
    area.value = this.message.text;
    const leave = () => { this.#isEdited = false; this.refresh(versions); };
    const back = () => { leave(); this.element.querySelector("[data-action=edit]").focus(); };
    const send = (event) => { event.preventDefault(); leave(); this.#actions.edit(this.message, area.value); };
    const keys = (event) => {
      if (event.key === "Escape") { event.stopPropagation(); back(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    };
    area.addEventListener("keydown", keys);
    this.#body.replaceChildren(h("form", { class: "edit", onsubmit: send }, area,
      h("div", { class: "buttons" }, h("button", { type: "button", onclick: back }, "Cancel"),
        h("button", { type: "submit", class: "primary" }, "Send"))));
    this.#foot.replaceChildren();
    this.#isEdited = true;
    area.focus();
  }
}

function working(text) {
  return h("p", { class: "working" }, h("span", { class: "pulse" }), text);
}

function figuresLine(timings) {
  const pairs = figuresOf(timings).map(({ label, value, more }) =>
    h("div", {}, h("dt", {}, label), h("dd", {}, h("b", {}, value), more && h("span", {}, more))));
  return h("dl", { class: "figures", "aria-label": "Figures of this answer" }, ...pairs);
}
