/** Small charts: a line over time with its limit, and a bar for a share. */

import { h, svg } from "./dom.mjs";

const WIDTH = 240;
const HEIGHT = 64;
const TOP = 4; // room for the width of a line at the limit

/**
 * Draw points [seconds, value] as a figure called `name`.
 * limit: a dashed line, or null; marks: seconds at which an answer began; format: a value as text.
 */
export function chart({ name, points, limit, marks, format }) {
  const values = points.map(([, value]) => value);
  const most = Math.max(limit ?? 0, ...values) || 1;
  const end = Math.max(points.at(-1)[0], 0.001);
  const x = (seconds) => round((seconds / end) * WIDTH);
  const y = (value) => round(HEIGHT - (value / most) * (HEIGHT - TOP));
  const line = points.map(([seconds, value]) => `${x(seconds)} ${y(value)}`).join("L");
  const label = summary(name, values, limit, end, format);
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart", role: "img", "aria-label": label });
  for (const mark of marks) drawing.append(svg("path", { class: "mark", d: `M${x(mark)} ${TOP}V${HEIGHT}` }));
  drawing.append(svg("path", { class: "area", d: `M${x(points[0][0])} ${HEIGHT}L${line}V${HEIGHT}Z` }));
  drawing.append(svg("path", { class: "line", d: `M${line}` }));
  if (limit) drawing.append(svg("path", { class: "limit", d: `M0 ${y(limit)}H${WIDTH}` }));
  return h("figure", {}, drawing, axis(end, limit ? `limit ${format(limit)}` : `highest ${format(most)}`));
}

/** Draw a share from 0 to 1 as a bar called `name`. (Browsers draw <meter> each in their own way.) */
export function bar(name, share) {
  const percent = round(100 * Math.min(1, share));
  const said = { role: "meter", "aria-label": name, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": percent };
  return svg("svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none", class: "bar", ...said },
    svg("rect", { width: 100, height: 6 }), svg("rect", { class: "share", width: percent, height: 6 }));
}

function axis(seconds, above) {
  const time = `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s of answers`;
  return h("figcaption", { "aria-hidden": "true" }, h("span", {}, time), h("span", {}, above));
}

function summary(name, values, limit, seconds, format) {
  const range = `from ${format(Math.min(...values))} to ${format(Math.max(...values))}`;
  const bound = limit ? `, limit ${format(limit)}` : "";
  return `${name} over ${seconds.toFixed(1)} seconds of answers: ${range}${bound}`;
}

function round(value) {
  return Math.round(value * 10) / 10;
}
