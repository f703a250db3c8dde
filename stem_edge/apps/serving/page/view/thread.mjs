/** The shown messages of a conversation; keeps scrolled to the end while an answer grows. */

import { shownPath, versionsOf } from "../data/conversation.mjs";
import { MessageView } from "./message.mjs";

const NEAR = 40; // pixels from the end within which a reader is taken to be at the end

export class Thread {
  #element;
  #actions;
  #toEnd;
  #views = new Map(); // by message's id
  #follows = true;
  #top = 0;

  /** element: the element that scrolls; toEnd: the button that scrolls to the end. */
  constructor(element, toEnd, actions) {
    this.#element = element;
    this.#actions = actions;
    this.#toEnd = toEnd;
    element.addEventListener("scroll", () => this.#scrolled());
    toEnd.addEventListener("click", () => this.follow());
    new ResizeObserver(() => this.#stay()).observe(element);
  }

  /** Show a conversation from scratch. */
  open(conversation) {
    this.#views.clear();
    this.show(conversation);
    this.follow();
  }

  /** Show the conversation after a message was added, chosen or finished. */
  show(conversation) {
    const path = shownPath(conversation);
    const elements = path.map((message) => {
      const view = this.#views.get(message.id) ?? new MessageView(message, this.#actions);
      this.#views.set(message.id, view);
      view.refresh(versionsOf(conversation, message));
      return view.element;
    });
    const list = this.#element.firstElementChild;
    const gone = [...list.children].filter((child) => !elements.includes(child));
    gone.forEach((child) => child.remove());
    elements.forEach((element, i) => {
      if (list.children[i] !== element) list.insertBefore(element, list.children[i] ?? null);
    });
    this.#stay();
  }

  /** Update an answer that is being generated. */
  progress(message) {
    if (message.state !== "running") return;
    this.#views.get(message.id)?.progress();
    this.#stay();
  }

  /** Give the focus to a control of a message. */
  focus(message, action) {
    const controls = this.#views.get(message.id)?.element;
    const wanted = controls?.querySelector(`[data-action=${action}]:not(:disabled)`);
    (wanted ?? controls?.querySelector("[data-action]:not(:disabled)"))?.focus();
  }

  /** Move the focus to the messages if the control that had it is gone. */
  take() {
    this.#element.focus({ preventScroll: true });
  }

  /** Go to the end, and stay there. */
  follow() {
    this.#follows = true;
    this.#stay();
  }

  #stay() {
    if (this.#follows) this.#element.scrollTop = this.#element.scrollHeight;
    this.#scrolled();
  }

  #scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.#element;
    const isNear = scrollHeight - scrollTop - clientHeight < NEAR;
    this.#follows = isNear || (this.#follows && scrollTop >= this.#top); // a banner may have taken the room
    this.#top = scrollTop;
    this.#toEnd.hidden = this.#follows;
  }
}
