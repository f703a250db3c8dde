/** Menu of a conversation: rename, export, delete; and the import of a file. */

import { fromJson, toJson, toMarkdown } from "../data/transfer.mjs";
import { askedText, confirmed } from "./dialogs.mjs";
import { download } from "./dom.mjs";

const MAX_IMPORT_BYTES = 64 * 1024 * 1024;

/** Connect the menu and the import button. problem(text): shows an error to the user. */
export function connectMenu(library, chat, problem) {
  const menu = document.querySelector("#menu");
  const on = (id, action) => document.querySelector(`#${id}`).addEventListener("click", () => {
    menu.open = false;
    action(chat.conversation);
  });
  on("rename", (conversation) => rename(library, conversation));
  on("delete", (conversation) => remove(library, chat, conversation));
  on("export-markdown", (it) => download(`${fileName(it)}.md`, "text/markdown", toMarkdown(it)));
  on("export-json", (it) => download(`${fileName(it)}.json`, "application/json", toJson(it)));
  closeElsewhere(menu);
  connectImport(library, chat, problem);
}

async function rename(library, conversation) {
  const title = await askedText("Rename the conversation", "Title", conversation.title);
  if (title === null) return;
  conversation.title = title.trim();
  await library.save(conversation);
}

async function remove(library, chat, conversation) {
  const name = conversation.title || "New conversation";
  const text = `“${name}” and all its versions are deleted from this browser.`;
  if (!(await confirmed("Delete the conversation?", text, "Delete"))) return;
  chat.stop();
  await library.remove(conversation);
  chat.begin();
}

function connectImport(library, chat, problem) {
  const input = document.querySelector("#import-file");
  document.querySelector("#import").addEventListener("click", () => input.click());
  input.addEventListener("change", async () => {
    try {
      const conversation = fromJson(await textOf(input.files[0]));
      await library.save(conversation);
      chat.open(conversation);
    } catch (error) {
      problem(`Not imported: ${error.message}`);
    }
    input.value = "";
  });
}

async function textOf(file) {
  if (file.size > MAX_IMPORT_BYTES) throw new Error("The file has more than 64 MiB.");
  return file.text();
}

function closeElsewhere(menu) {
  addEventListener("click", (event) => {
    if (!menu.contains(event.target)) menu.open = false;
  });
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !menu.open) return;
    event.stopPropagation();
    menu.open = false;
    menu.querySelector("summary").focus();
  });
}

function fileName(conversation) {
  const words = conversation.title.normalize("NFKD").toLowerCase().match(/[a-z0-9]+/g) ?? ["conversation"];
  return words.join("-").slice(0, 60);
}
