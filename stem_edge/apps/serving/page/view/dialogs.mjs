/** Dialogs. Each returns a promise of the result; null if the user closes the dialog. */

import { NUMBERS } from "../data/settings.mjs";
import { h } from "./dom.mjs";

/** Ask for confirmation; true or null. */
export function confirmed(title, text, action) {
  return asked({ title, action, fields: [h("p", {}, text)], read: () => true, danger: true });
}

/** Ask for one line of text. */
export function askedText(title, label, value, type = "text") {
  const input = h("input", { type, id: "asked", value, required: true, autocomplete: "off" });
  return asked({ title, action: "Save", fields: [h("label", { for: "asked" }, label), input], read: () => input.value });
}

/** Edit the settings and return them. system: the conversation's system prompt. usual: the server's defaults. */
export function askedSettings(settings, system, hasTemplate, usual) {
  const prompt = h("textarea", { id: "system", rows: 4, disabled: !hasTemplate, "aria-describedby": "system-hint" });
  prompt.value = system;
  const stop = h("textarea", { id: "stop", rows: 2, "aria-describedby": "stop-hint" });
  stop.value = settings.stop;
  const numbers = NUMBERS.map((field) => numberField(field, settings.numbers[field.name], usual[field.name]));
  const fields = [
    field("system", "System prompt", prompt, hasTemplate
      ? "For this conversation, and for those that begin after it." : "This model has no chat template, so it has no system prompt."),
    h("fieldset", {}, h("legend", {}, "Sampling"), h("p", { class: "quiet" }, "A field left empty is as the model has it: in grey, if that is a number."),
      h("div", { class: "numbers" }, ...numbers.map(({ element }) => element))),
    field("stop", "Stop texts", stop, "One a line; the answer ends before any of them."),
  ];
  const read = () => ({ system: prompt.value, stop: stop.value,
    numbers: Object.fromEntries(numbers.flatMap(({ read: entry }) => entry())) });
  return asked({ title: "Settings", action: "Save", fields, read });
}

function numberField({ name, label, hint, ...limits }, value, usual = "") {
  const input = h("input", { type: "number", id: name, inputmode: "decimal", value, placeholder: String(usual), ...limits,
    "aria-describedby": `${name}-hint` });
  const read = () => (input.value === "" ? [] : [[name, input.valueAsNumber]]);
  return { element: field(name, label, input, hint), read };
}

function field(id, label, input, hint) {
  return h("div", { class: "field" }, h("label", { for: id }, label), input,
    h("p", { class: "hint", id: `${id}-hint` }, hint));
}

function asked({ title, action, fields, read, danger = false }) {
  return new Promise((resolve) => {
    let answer = null;
    const submit = (event) => {
      event.preventDefault();
      answer = read();
      dialog.close();
    };
    const cancel = h("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
    const go = h("button", { type: "submit", class: danger ? "danger" : "primary" }, action);
    const form = h("form", { onsubmit: submit }, h("h2", { id: "dialog-title" }, title),
      h("div", { class: "fields" }, ...fields), h("div", { class: "buttons" }, cancel, go));
    const dialog = h("dialog", { "aria-labelledby": "dialog-title" }, form);
    dialog.addEventListener("close", () => { dialog.remove(); resolve(answer); });
    document.body.append(dialog);
    dialog.showModal();
  });
}
