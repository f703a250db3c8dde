/** Render a model's Markdown, which is untrusted, as elements without scripts or forms. */

import { Marked } from "../vendor/marked.esm.js";
import DOMPurify from "../vendor/purify.es.mjs";
import { copyFrom, h } from "./dom.mjs";

// HTML in a model's text: these tags work, without attributes; all other HTML is shown as text.
const INLINE = ["b", "br", "em", "i", "kbd", "mark", "s", "small", "strong", "sub", "sup", "u"];
const BARE = new RegExp(`(</?(?:${INLINE.join("|")})\\s*/?>)`, "i");
const BLOCKS = [
  "a", "blockquote", "code", "del", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "table", "tbody", "td", "th",
  "thead", "tr", "ul",
];
const PLAIN = ["align", "start"];
const RULES = {
  ALLOWED_TAGS: [...INLINE, ...BLOCKS],
  ALLOWED_ATTR: ["class", "href", "title", ...PLAIN],
  ADD_URI_SAFE_ATTR: PLAIN,
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const marked = new Marked({
  gfm: true,
  renderer: {
    // The page itself uses the first two levels of headings.
    heading({ tokens, depth }) {
      const level = Math.min(6, depth + 2);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>\n`;
    },
    // An image would tell its host who reads the answer, so show a link, which waits for a click.
    image({ href, text }) {
      return `<a href="${escaped(href)}">Image: ${escaped(text || href)}</a>`;
    },
    html({ text, block }) {
      const shown = text.split(BARE).map((part, i) => (i % 2 ? part : escaped(part))).join("");
      return block ? `<p>${shown}</p>` : shown;
    },
    checkbox({ checked }) {
      return checked ? "☑ " : "☐ ";
    },
  },
});

DOMPurify.addHook("uponSanitizeAttribute", (_, attribute) => {
  // With other classes, an answer could look like a part of the page.
  if (attribute.attrName === "class" && !/^language-[\w+#.-]+$/.test(attribute.attrValue)) {
    attribute.keepAttr = false;
  }
});
DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer");
  }
});

function escaped(text) {
  return text.replace(/[&<>"]/g, (character) => `&#${character.charCodeAt(0)};`);
}

/** Shows Markdown in an element; as the text grows, replaces only the blocks that changed. */
export class MarkdownView {
  #blocks = []; // {html, nodes} of each block shown

  constructor(element) {
    this.element = element;
  }

  show(text) {
    const tokens = marked.lexer(text);
    const htmls = tokens.map((token) => marked.parser([token])).filter((html) => html.trim());
    const same = this.#blocks.findIndex((block, i) => block.html !== htmls[i]);
    const kept = same < 0 ? this.#blocks.length : same;
    for (const block of this.#blocks.splice(kept)) block.nodes.forEach((node) => node.remove());
    for (const html of htmls.slice(kept)) {
      const fragment = safe(html);
      this.#blocks.push({ html, nodes: [...fragment.childNodes] });
      this.element.append(fragment);
    }
  }
}

function safe(html) {
  const fragment = DOMPurify.sanitize(html, RULES);
  for (const pre of fragment.querySelectorAll("pre")) pre.replaceWith(codeBlock(pre));
  for (const table of fragment.querySelectorAll("table")) {
    const frame = h("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  return fragment;
}

/** A code block with the name of its language and a button that copies it. */
function codeBlock(pre) {
  const code = pre.querySelector("code") ?? pre;
  const language = /language-(\S+)/.exec(code.className)?.[1] ?? "text";
  const button = h("button", { type: "button", class: "copy-code", "aria-label": `Copy code (${language})`,
    onclick: () => copyFrom(button, code.textContent) }, h("span", {}, "Copy"));
  const area = h("pre", { tabindex: "0", role: "group", "aria-label": `Code (${language})` });
  area.append(h("code", {}, code.textContent));
  return h("div", { class: "code" }, h("div", { class: "code-head" }, h("span", {}, language), button), area);
}
