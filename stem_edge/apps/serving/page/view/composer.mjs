/** The input for a message: text, files, and the button that sends it or stops the answer. */

import { readTextFile } from "../data/files.mjs";
import { h, icon, iconButton } from "./dom.mjs";

export class Composer {
  #form;
  #area;
  #send;
  #chips;
  #files = [];
  #problem;
  #runs = false;

  /** form: #composer of the page; actions: {send(text, files), stop()}. */
  constructor(form, actions) {
    this.#form = form;
    this.#area = form.querySelector("textarea");
    this.#send = form.querySelector("#send");
    this.#chips = form.querySelector("#files");
    this.#problem = form.querySelector("#file-problem");
    this.#area.addEventListener("input", () => this.#grow());
    this.#area.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.#runs) form.requestSubmit();
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#runs) actions.stop();
      else if (this.#area.value.trim() || this.#files.length) actions.send(this.#area.value, this.#files);
    });
    this.#choosing(form.querySelector("#choose"), form.querySelector("#choose-files"));
    this.#dropping(document.querySelector("#drop"));
    this.running(false);
  }

  /** Set whether an answer is running; then the button stops it. */
  running(runs) {
    this.#runs = runs;
    const label = runs ? "Stop" : "Send";
    this.#send.setAttribute("aria-label", label);
    this.#send.title = runs ? "Stop (Esc)" : "Send (Enter)";
    this.#send.classList.toggle("stops", runs);
    this.#send.replaceChildren(icon(runs ? "stop" : "send"));
  }

  clear() {
    this.#area.value = "";
    this.#files = [];
    this.#problem.textContent = "";
    this.#showFiles();
    this.#grow();
  }

  focus() {
    this.#area.focus();
  }

  /** Placeholder text of the empty input field. */
  set hint(text) {
    this.#area.placeholder = text;
  }

  async #add(files) {
    const problems = [];
    for (const file of files) {
      try {
        this.#files.push(await readTextFile(file));
      } catch (error) {
        problems.push(error.message);
      }
    }
    this.#problem.textContent = problems.join(" ");
    this.#showFiles();
    this.#area.focus();
  }

  #showFiles() {
    const chips = this.#files.map((file) => h("li", { class: "chip" }, h("span", {}, file.name),
      iconButton("close", `Remove ${file.name}`, () => {
        this.#files = this.#files.filter((other) => other !== file);
        this.#showFiles();
        this.#area.focus();
      })));
    this.#chips.replaceChildren(...chips);
    this.#chips.hidden = !chips.length;
  }

  #grow() {
    this.#area.rows = Math.min(10, Math.max(1, this.#area.value.split("\n").length));
  }

  #choosing(button, input) {
    button.addEventListener("click", () => input.click());
    input.addEventListener("change", async () => {
      await this.#add([...input.files]);
      input.value = ""; // so that the same file can be chosen again
    });
    this.#area.addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.#add([...event.clipboardData.files]);
    });
  }

  #dropping(overlay) {
    const holdsFiles = (event) => event.dataTransfer?.types.includes("Files");
    addEventListener("dragover", (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault();
      overlay.hidden = false;
    });
    addEventListener("dragleave", (event) => { overlay.hidden ||= event.relatedTarget === null; });
    addEventListener("drop", (event) => {
      overlay.hidden = true;
      if (!holdsFiles(event)) return;
      event.preventDefault();
      this.#add([...event.dataTransfer.files]);
    });
  }
}
