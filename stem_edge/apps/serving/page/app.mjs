/** The page: creates its parts, and connects their events. */

import { Chat } from "./chat.mjs";
import { shownPath } from "./data/conversation.mjs";
import { Library } from "./data/library.mjs";
import { readSettings, writeSettings } from "./data/settings.mjs";
import { Answers } from "./server/answers.mjs";
import { Client } from "./server/client.mjs";
import { Composer } from "./view/composer.mjs";
import { askedSettings, askedText } from "./view/dialogs.mjs";
import { icon } from "./view/dom.mjs";
import { Drawer } from "./view/drawers.mjs";
import { connectMenu } from "./view/menu.mjs";
import { Overview } from "./view/overview.mjs";
import { Sidebar } from "./view/sidebar.mjs";
import { Status } from "./view/status.mjs";
import { Thread } from "./view/thread.mjs";

const $ = (selector) => document.querySelector(selector);
const ICONS = { "#show-sidebar": "menu", "#show-panel": "chart", "#settings": "settings", "#menu summary": "more",
  "#choose": "attach", "#to-end": "down", "#sidebar .close": "close", "#panel .close": "close" };

// Milliseconds between redraws: the model often runs on this processor, and drawing slows it down.
const SHOW_EVERY = 80;

let settings = readSettings();
let pending = 0;
const client = new Client(new URL("./", location.href));
const library = new Library();
const answers = new Answers(client, library);
const status = new Status(client, $("#banner"));
const chat = new Chat(library, answers, () => settings, status);
const composer = new Composer($("#composer"), {
  send(text, files) {
    composer.clear();
    chat.send(text, files);
    thread.follow();
  },
  stop: () => chat.stop(),
});
const thread = new Thread($("#thread"), $("#to-end"), {
  retry(message) {
    chat.retry(message);
    thread.take();
  },
  edit(message, text) {
    chat.edit(message, text);
    thread.take();
  },
  choose(message, action) {
    chat.choose(message);
    thread.focus(message, action);
  },
});
const sidebar = new Sidebar($("#sidebar"), library, answers, (conversation) => {
  chat.open(conversation);
  drawers.forEach((drawer) => drawer.leave());
});
const overview = new Overview(chat, status, sidebar, composer);
const drawers = [new Drawer($("#sidebar"), $("#show-sidebar"), 860), new Drawer($("#panel"), $("#show-panel"), 1180)];

function showProblem(text) {
  $("#file-problem").textContent = text;
}

async function askKey() {
  for (let title = "This server asks for a key"; ; title = "That key is not the server's") {
    const key = await askedText(title, "API key", "", "password");
    if (key === null) return false;
    client.key = key;
    await status.check();
    if (status.state !== "key") return true;
  }
}

answers.addEventListener("progress", ({ detail: { conversation, message } }) => {
  if (conversation !== chat.conversation) return;
  pending ||= setTimeout(() => {
    pending = 0;
    if (conversation !== chat.conversation) return;
    thread.progress(message);
    overview.figures();
  }, SHOW_EVERY);
});

answers.addEventListener("end", async ({ detail: { conversation, message, error } }) => {
  const end = { done: "Answer", stopped: "Stopped answer", cut: "Cut answer", failed: "The answer failed" };
  $("#announce").textContent = `${end[message.state]}: ${message.note || message.text}`;
  if (error && error.name !== "AbortError") status.check();
  if (conversation !== chat.conversation) return sidebar.show();
  thread.show(conversation);
  overview.show();
  if (error?.kind === "key" && (await askKey())) chat.retry(message);
});

chat.addEventListener("open", () => {
  thread.open(chat.conversation);
  history.replaceState(null, "", library.get(chat.conversation.id) ? `#${chat.conversation.id}` : "#");
  overview.show();
});
chat.addEventListener("change", () => {
  thread.show(chat.conversation);
  history.replaceState(null, "", `#${chat.conversation.id}`);
  overview.show();
});
library.addEventListener("change", () => overview.title());
library.addEventListener("replace", ({ detail: id }) => {
  if (id !== chat.conversation.id || chat.runs) return;
  const other = library.get(id);
  if (other) chat.open(other);
  else chat.begin();
});
status.addEventListener("ready", () => overview.model());
status.addEventListener("key", askKey);

$("#new").addEventListener("click", () => {
  chat.begin();
  drawers.forEach((drawer) => drawer.leave());
  composer.focus();
});
$("#skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the conversation
  composer.focus();
});
$("#settings").addEventListener("click", async () => {
  const changed = await askedSettings(settings, chat.conversation.system, chat.hasTemplate, chat.usual);
  if (!changed) return;
  settings = changed;
  writeSettings(settings);
  chat.conversation.system = settings.system;
  if (library.get(chat.conversation.id)) library.save(chat.conversation);
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) chat.stop();
});

setInterval(() => {
  if (chat.runs) thread.progress(shownPath(chat.conversation).at(-1)); // seconds of waiting
}, 1000);
for (const [selector, name] of Object.entries(ICONS)) $(selector).replaceChildren(icon(name));
library.addEventListener("unkept", ({ detail }) => showProblem(`The browser does not keep this: ${detail}`));
connectMenu(library, chat, showProblem);
if (!(await library.open())) showProblem("This browser keeps nothing here: conversations end with the page.");
const wanted = library.get(location.hash.slice(1));
if (wanted && wanted !== chat.conversation) chat.open(wanted);
overview.show();
overview.model();
status.check();
composer.focus();
