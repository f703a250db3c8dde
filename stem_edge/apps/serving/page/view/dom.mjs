/** Create elements in one expression, without HTML in strings. */

const SVG = "http://www.w3.org/2000/svg";

/** Create an element. Attributes on... are event listeners; null and false omit an attribute. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== false && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== false));
  return element;
}

/** Create an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Lines on a 24 by 24 grid.
const ICONS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  more: "M5 11v2h.01v-2zM12 11v2h.01v-2zM19 11v2h.01v-2z",
  chart: "M4 19V5M4 19h16M8 15l4-5 3 3 5-6",
  settings: "M4 8h8M18 8h2M4 16h2M12 16h8M15 5v6M9 13v6",
  attach: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  retry: "M20 11a8 8 0 1 0-2 6M20 5v6h-6",
  previous: "M14 6l-6 6 6 6",
  next: "M10 6l6 6-6 6",
  close: "M6 6l12 12M18 6L6 18",
  down: "M12 5v14M6 13l6 6 6-6",
};

/** An icon that screen readers skip, because the control around it has a label. */
export function icon(name) {
  return svg("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" },
    svg("path", { d: ICONS[name] }));
}

/** A button that shows an icon; `label` is its name for screen readers. */
export function iconButton(name, label, onclick, attributes = {}) {
  const shared = { type: "button", class: "icon-button", "aria-label": label, title: label };
  return h("button", { ...shared, onclick, ...attributes }, icon(name));
}

/** Offer text to the user as a file. */
export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000); // the download has begun long before
}

/** Copy text; without https or localhost, browsers allow only the older way. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = h("textarea", { class: "visually-hidden", "aria-label": "Text to copy" });
  area.value = text;
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** Copy text, and confirm that on the button for a moment. */
export async function copyFrom(button, text) {
  await copy(text);
  button.classList.add("copied");
  setTimeout(() => button.classList.remove("copied"), 1500);
}
