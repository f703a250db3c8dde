/** Metrics of an answer, from the timings that the server sends, formatted for people. */

const MOST_SAMPLES = 120;

/** Format a size: 3 digits and a decimal unit. */
export function formatSize(bytes) {
  let value = bytes;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (Math.abs(value) < 999.5) return `${threeDigits(value)} ${unit}`;
    value /= 1000;
  }
  return `${threeDigits(value)} TB`;
}

/** Format a rate: 3 digits below 100, whole numbers above. */
export function formatRate(value) {
  return value >= 100 ? Math.round(value).toLocaleString("en") : String(threeDigits(value));
}

function threeDigits(value) {
  return Number(value.toPrecision(3));
}

/** Number of tokens in the context after an answer: its prompt (computed or cached) and the answer. */
export function contextUsed(timings, most) {
  // With a full context, the last token is sent, but never enters the context.
  return Math.min(most, timings.prompt_n + (timings.cache_n ?? 0) + timings.predicted_n);
}

/** Share of tokens whose rows needed no read; null for a model without rows. */
export function hitShare({ row_hits: hits = 0, row_misses: misses = 0 }) {
  return hits + misses ? hits / (hits + misses) : null;
}

/** Bytes read from flash per token that looked up rows; null for a model without rows. */
export function flashPerToken({ row_hits: hits = 0, row_misses: misses = 0, flash_bytes: bytes }) {
  return hits + misses ? bytes / (hits + misses) : null;
}

/** Return [{label, value, more}], the metrics that are shown under an answer. */
export function figuresOf(timings) {
  const share = hitShare(timings);
  const rate = (value) => (value > 0 ? `${formatRate(value)} tok/s` : "–"); // of no token there is none
  const figures = [
    { label: "Answer", value: rate(timings.predicted_per_second), more: tokens(timings.predicted_n) },
    { label: "Prompt", value: rate(timings.prompt_per_second), more: promptTokens(timings) },
  ];
  if (share !== null) {
    const each = `${formatSize(flashPerToken(timings))} a token`;
    figures.push({ label: "Rows in memory", value: `${threeDigits(share * 100)} %`, more: "" });
    figures.push({ label: "Read from flash", value: formatSize(timings.flash_bytes), more: each });
  }
  if (timings.memory_bytes) {
    const limit = timings.memory_limit ? `of ${formatSize(timings.memory_limit)}, plus weights in files` : "";
    figures.push({ label: "Memory", value: formatSize(timings.memory_bytes), more: limit });
  }
  return figures;
}

function tokens(count) {
  return `${count.toLocaleString("en")} ${count === 1 ? "token" : "tokens"}`;
}

function promptTokens({ prompt_n: read, cache_n: cached = 0 }) {
  return cached ? `${tokens(read)}, ${cached.toLocaleString("en")} cached` : tokens(read);
}

/** Add a sample for the charts: [seconds since the first token, memory, tokens/s, flash/token]. */
export function addSample(samples, timings) {
  const { predicted_ms: time, memory_bytes: memory = null, predicted_per_second: rate } = timings;
  samples.push([time / 1000, memory, rate || null, flashPerToken(timings)]); // one token has no rate yet
  // Drop every second sample whenever there are too many, so that a conversation stays small.
  if (samples.length > MOST_SAMPLES) samples.splice(0, samples.length, ...samples.filter((_, i) => i % 2));
}
