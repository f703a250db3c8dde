/** The page: makes its parts, and tells each what the others did. */

import { Chat } from "./chat.mjs";
import { shownPath } from "./data/conversation.mjs";
import { contextUsed } from "./data/figures.mjs";
import { Library } from "./data/library.mjs";
import { readSettings, writeSettings } from "./data/settings.mjs";
import { Answers } from "./server/answers.mjs";
import { Client } from "./server/client.mjs";
import { Composer } from "./view/composer.mjs";
import { askedSettings, askedText } from "./view/dialogs.mjs";
import { icon } from "./view/dom.mjs";
import { Drawer } from "./view/drawers.mjs";
import { connectMenu } from "./view/menu.mjs";
import { showPanel } from "./view/panel.mjs";
import { Sidebar } from "./view/sidebar.mjs";
import { Status } from "./view/status.mjs";
import { Thread } from "./view/thread.mjs";

const $ = (selector) => document.querySelector(selector);
const ICONS = { "#show-sidebar": "menu", "#show-panel": "chart", "#settings": "settings", "#menu summary": "more",
  "#choose": "attach", "#to-end": "down", "#sidebar .close": "close", "#panel .close": "close" };

let settings = readSettings();
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
  retry: (message) => chat.retry(message),
  edit: (message, text) => { chat.edit(message, text); composer.focus(); },
  choose(message, action) {
    chat.choose(message);
    thread.focus(message, action);
  },
});
const sidebar = new Sidebar($("#sidebar"), library, answers, (conversation) => {
  chat.open(conversation);
  drawers.forEach((drawer) => drawer.leave());
});
const drawers = [new Drawer($("#sidebar"), $("#show-sidebar"), 860), new Drawer($("#panel"), $("#show-panel"), 1180)];

function showState() {
  const { conversation } = chat;
  const last = shownPath(conversation).at(-1);
  $("#title").textContent = conversation.title || "New conversation";
  document.title = `${conversation.title || "New conversation"} · stem-edge`;
  $("#empty").hidden = Boolean(last);
  $("#menu").hidden = !last;
  composer.running(chat.runs);
  showContext(shownPath(conversation).findLast((message) => message.timings)?.timings);
  showPanel($("#figures"), conversation, status.props);
  sidebar.show(conversation);
}

function showContext(timings) {
  const most = status.props?.context_length;
  $("#context").hidden = !(timings && most);
  if ($("#context").hidden) return;
  const used = contextUsed(timings);
  $("#context meter").value = Math.min(1, used / most);
  $("#context span").textContent = `${used.toLocaleString("en")} of ${most.toLocaleString("en")} tokens`;
}

function showModel() {
  const { props } = status;
  $("#model").textContent = props?.model ?? "";
  composer.hint = chat.hasTemplate ? "Ask something" : "Begin a text";
  $("#empty").textContent = chat.hasTemplate
    ? "What is written here goes to the model on this server, and nowhere else."
    : "This model has no chat template: it goes on with your text instead of answering it.";
  showState();
}

async function askKey() {
  const key = await askedText("This server asks for a key", "API key", "", "password");
  if (key === null) return false;
  client.key = key;
  await status.check();
  return true;
}

answers.addEventListener("progress", ({ detail }) => {
  if (detail.conversation !== chat.conversation) return;
  thread.progress(detail.message);
  pendingFigures ||= requestAnimationFrame(() => {
    pendingFigures = 0;
    showContext(detail.message.timings);
    showPanel($("#figures"), chat.conversation, status.props);
  });
});
let pendingFigures = 0;

answers.addEventListener("end", async ({ detail: { conversation, message, error } }) => {
  const end = { done: "Answer", stopped: "Stopped answer", cut: "Cut answer", failed: "The answer failed" };
  $("#announce").textContent = `${end[message.state]}: ${message.note || message.text}`;
  if (error && error.name !== "AbortError") status.check();
  if (conversation !== chat.conversation) return sidebar.show();
  thread.show(conversation);
  showState();
  if (error?.kind === "key" && (await askKey())) chat.retry(message);
});

chat.addEventListener("open", () => {
  thread.open(chat.conversation);
  history.replaceState(null, "", library.get(chat.conversation.id) ? `#${chat.conversation.id}` : "#");
  showState();
});
chat.addEventListener("change", () => {
  thread.show(chat.conversation);
  history.replaceState(null, "", `#${chat.conversation.id}`);
  showState();
});
library.addEventListener("change", () => {
  $("#title").textContent = chat.conversation.title || "New conversation";
  sidebar.show();
});
status.addEventListener("ready", showModel);
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
  const changed = await askedSettings(settings, chat.conversation.system, chat.hasTemplate);
  if (!changed) return;
  settings = changed;
  writeSettings(settings);
  chat.conversation.system = settings.system;
  if (library.get(chat.conversation.id)) library.save(chat.conversation);
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) chat.stop();
});

for (const [selector, name] of Object.entries(ICONS)) $(selector).replaceChildren(icon(name));
connectMenu(library, chat, (text) => { $("#file-problem").textContent = text; });
await library.open();
if (!library.keeps) $("#file-problem").textContent = "This browser keeps nothing here: conversations end with the page.";
const wanted = library.get(location.hash.slice(1));
if (wanted) chat.open(wanted);
showModel();
status.check();
composer.focus();
