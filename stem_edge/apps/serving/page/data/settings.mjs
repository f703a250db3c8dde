/** The user's settings for answers, saved in the browser. Empty: the model's default. */

const KEY = "stem-edge.settings";

/** Numeric settings, by the name of the request's field: description and range. */
export const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: "any",
    hint: "0 always takes the most probable token." },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: "any",
    hint: "Fewest tokens whose probabilities reach this sum." },
  { name: "top_k", label: "Top k", min: 0, max: 1000000, step: 1,
    hint: "The k most probable tokens; 0 keeps all." },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: "any",
    hint: "At least this share of the highest probability." },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, max: 10, step: "any",
    hint: "Above 1 makes tokens seen before less likely." },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: "any",
    hint: "For tokens that the answer has at all." },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: "any",
    hint: "For tokens, each time that the answer has them." },
  { name: "max_tokens", label: "Longest answer", min: 1, max: 1000000, step: 1, hint: "In tokens." },
  { name: "seed", label: "Seed", min: 0, max: 4294967295, step: 1,
    hint: "The same seed gives the same answer." },
];

/** Read the settings: {numbers: {name: number}, stop: text, system: text}. */
export function readSettings() {
  const empty = { numbers: {}, stop: "", system: "" };
  try {
    return { ...empty, ...JSON.parse(localStorage.getItem(KEY)) };
  } catch {
    return empty; // what another version wrote, or nothing may be kept here
  }
}

/** Save the settings for this visit and later ones. */
export function writeSettings(settings) {
  localStorage.setItem(KEY, JSON.stringify(settings));
}

/** The fields of a request that follow from the settings. */
export function samplingOf({ numbers, stop }) {
  const stops = stop.split("\n").filter((line) => line !== "");
  return { ...numbers, ...(stops.length && { stop: stops }) };
}
