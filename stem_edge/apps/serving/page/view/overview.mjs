/** The parts around the messages: title, model, context, metrics, list of conversations. */

import { shownPath } from "../data/conversation.mjs";
import { contextUsed } from "../data/figures.mjs";
import { bar } from "./chart.mjs";
import { showPanel } from "./panel.mjs";

const $ = (selector) => document.querySelector(selector);
const UNNAMED = "New conversation";

export class Overview {
  #chat;
  #status;
  #sidebar;
  #composer;

  constructor(chat, status, sidebar, composer) {
    this.#chat = chat;
    this.#status = status;
    this.#sidebar = sidebar;
    this.#composer = composer;
  }

  /** Show the current conversation. */
  show() {
    const { conversation, runs } = this.#chat;
    const isEmpty = shownPath(conversation).length === 0;
    $("#empty").hidden = !isEmpty;
    $("#menu").hidden = isEmpty;
    this.#composer.running(runs);
    this.title();
    this.figures();
  }

  /** Show the title, also in the list of conversations. */
  title() {
    const title = this.#chat.conversation.title || UNNAMED;
    $("#title").textContent = title;
    document.title = `${title} · stem-edge`;
    this.#sidebar.show(this.#chat.conversation);
  }

  /** Show the metrics of the answers so far. */
  figures() {
    const { conversation } = this.#chat;
    const last = shownPath(conversation).findLast((message) => message.timings);
    this.#context(last?.timings);
    showPanel($("#figures"), conversation, this.#status.props);
  }

  /** Show the model's name, and whether it answers or continues texts. */
  model() {
    const { hasTemplate } = this.#chat;
    const model = this.#status.props?.model;
    $("#model").textContent = model ? `Model: ${model}` : "";
    this.#composer.hint = hasTemplate ? "Ask something" : "Begin a text";
    $("#empty").textContent = hasTemplate
      ? `Your messages go to the model ${model ?? ""} on this server, and nowhere else.`
      : "This model has no chat template: it continues your text instead of answering it.";
    this.figures();
  }

  #context(timings) {
    const most = this.#status.props?.context_length;
    $("#context").hidden = !(timings && most);
    if ($("#context").hidden) return;
    const used = contextUsed(timings, most);
    const text = `${used.toLocaleString("en")} of ${most.toLocaleString("en")} tokens`;
    $("#context").replaceChildren(bar("Context used", used / most), text);
  }
}
