/** Text files that are attached to a message. */

export const MAX_FILE_BYTES = 256 * 1024; // some 64,000 tokens: more than most contexts hold

/** Return {name, text} of a File; raises Error that says why it cannot be used. */
export async function readTextFile(file) {
  if (file.size > MAX_FILE_BYTES) {
    throw new Error(`${file.name} is ${Math.ceil(file.size / 1024)} KiB; at most 256 KiB fit.`);
  }
  const bytes = new Uint8Array(await file.arrayBuffer());
  return { name: file.name, text: decoded(bytes, file.name) };
}

function decoded(bytes, name) {
  const refused = new Error(`${name} is not a file of text (UTF-8).`);
  if (bytes.includes(0)) throw refused;
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    throw refused;
  }
}

/** Text of a message after its files, each of which is a fenced block under its name. */
export function contentOf(message) {
  return [...(message.files ?? []).map(fenced), message.text].join("\n\n");
}

function fenced({ name, text }) {
  // The fence must be longer than any fence in the text, which would end the block.
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `File ${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}
