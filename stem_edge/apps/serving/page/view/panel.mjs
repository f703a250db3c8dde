/** The metrics beside a conversation: of its last answer, and charts of all shown answers. */

import { figuresOf, flashPerToken, formatRate, formatSize, hitShare } from "../data/figures.mjs";
import { shownPath } from "../data/conversation.mjs";
import { bar, chart } from "./chart.mjs";
import { h } from "./dom.mjs";

/** Show metrics of the conversation in the panel's body; props: the server's properties. */
export function showPanel(body, conversation, props) {
  const answers = shownPath(conversation).filter((message) => message.timings);
  const last = answers.at(-1)?.timings;
  const parts = last ? live(last, answers) : [empty()];
  body.replaceChildren(...parts.filter(Boolean), about(props));
}

function live(last, answers) {
  const { samples, marks } = joined(answers);
  const series = (index) => samples.filter((sample) => Number.isFinite(sample[index]))
    .map((sample) => [sample[0], sample[index]]);
  const figures = Object.fromEntries(figuresOf(last).map((figure) => [figure.label, figure]));
  const memory = { name: "Memory", points: series(1), limit: last.memory_limit, marks, format: formatSize };
  const rate = { name: "Answer", points: series(2), limit: null, marks, format: (v) => `${formatRate(v)} tok/s` };
  const flash = { name: "Read from flash", points: series(3), limit: null, marks, format: (v) => `${formatSize(v)} a token` };
  return [
    figures.Memory && tile(figures.Memory, { drawn: memory }),
    flashPerToken(last) !== null && tile(figures["Read from flash"], { drawn: flash }),
    tile(figures.Answer, { drawn: rate }),
    tile(figures.Prompt, { half: hitShare(last) !== null }),
    hitShare(last) !== null && tile(figures["Rows in memory"], { share: hitShare(last), half: true }),
  ];
}

/** Join the samples of several answers, without the time between the answers. */
function joined(answers) {
  const samples = [];
  const marks = [];
  let begin = 0;
  for (const { samples: own = [] } of answers) {
    if (begin) marks.push(begin);
    samples.push(...own.map(([seconds, ...rest]) => [begin + seconds, ...rest]));
    begin += own.at(-1)?.[0] ?? 0;
  }
  return { samples, marks };
}

function tile({ label, value, more }, { drawn = null, share = null, half = false }) {
  const line = h("p", { class: "value" }, h("strong", {}, value), more && h("span", {}, more));
  const meter = share !== null && bar(label, share);
  const graph = drawn && drawn.points.length > 1 && chart(drawn);
  return h("section", { class: half ? "tile half" : "tile" }, h("h3", {}, label), line, meter, graph);
}

function empty() {
  return h("p", { class: "quiet" }, "After the first answer, its speed and the memory in use are shown here.");
}

function about(props) {
  if (!props) return "";
  const rows = [["Model", props.model], ["Engine", props.engine], ["Version", props.build_info],
    ["Memory limit", props.memory_limit && formatSize(props.memory_limit)]];
  const pairs = rows.filter(([, value]) => value).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))]);
  return h("dl", { class: "about" }, ...pairs);
}
