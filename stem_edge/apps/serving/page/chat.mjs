/** The conversation that is shown, and the user's actions in it. */

import { addMessage, choose, newConversation, pathTo, shownPath } from "./data/conversation.mjs";
import { samplingOf } from "./data/settings.mjs";
import { requestFor } from "./server/request.mjs";

export class Chat extends EventTarget {
  #library;
  #answers;
  #settings;
  #status;

  /** settings(): returns the current settings; status: Status of the server. */
  constructor(library, answers, settings, status) {
    super();
    this.#library = library;
    this.#answers = answers;
    this.#settings = settings;
    this.#status = status;
    this.begin();
  }

  /** The server's default sampling parameters, by name. */
  get usual() {
    return this.#status.props?.sampling ?? {};
  }

  get hasTemplate() {
    return this.#status.props?.has_chat_template !== false;
  }

  get runs() {
    return this.#answers.runs(this.conversation);
  }

  /** Show an empty conversation; it is saved with its first message. */
  begin() {
    this.open(newConversation(this.#settings().system, Date.now()));
  }

  open(conversation) {
    this.conversation = conversation;
    this.dispatchEvent(new Event("open"));
  }

  /** Add a message at the end and ask for its answer. */
  send(text, files) {
    const last = shownPath(this.conversation).at(-1);
    this.#say(last?.id ?? null, text, files);
  }

  /** Add another version of a user's message and ask for its answer. */
  edit(message, text) {
    this.stop();
    this.#say(message.parent, text, message.files);
  }

  /** Ask again: add another version of an answer. */
  retry(message) {
    this.stop();
    this.#answer(this.conversation.messages[message.parent]);
  }

  /** Show another version of a message. */
  choose(message) {
    choose(this.conversation, message);
    this.#changed();
  }

  stop() {
    this.#answers.stop(this.conversation);
  }

  #say(parent, text, files) {
    const fields = { role: "user", text, files };
    this.#answer(addMessage(this.conversation, parent, fields, Date.now()));
  }

  #answer(question) {
    const { conversation, hasTemplate } = this;
    const messages = pathTo(conversation, question);
    const sampling = samplingOf(this.#settings());
    const request = requestFor(messages, conversation.system, sampling, hasTemplate);
    const fields = { role: "assistant", plain: !hasTemplate };
    const answer = addMessage(conversation, question.id, fields, Date.now());
    this.#answers.write(conversation, answer, request);
    this.#changed();
  }

  #changed() {
    this.#library.save(this.conversation);
    this.dispatchEvent(new Event("change"));
  }
}
