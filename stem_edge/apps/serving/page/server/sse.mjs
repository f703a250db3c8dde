/** Parse server-sent events from text that arrives in arbitrary pieces. */

export class EventParser {
  #rest = "";
  #data = [];

  /** Add the next piece of the stream; return the data of the events that are now complete. */
  push(piece) {
    const lines = (this.#rest + piece).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    return lines.flatMap((line) => this.#line(line));
  }

  #line(line) {
    if (line === "") {
      const event = this.#data;
      this.#data = [];
      return event.length ? [event.join("\n")] : [];
    }
    // This page ignores comments (": keepalive"), and names and ids of events.
    if (line.startsWith("data:")) this.#data.push(line.slice(line[5] === " " ? 6 : 5));
    return [];
  }
}

/** Yield the data of each event of a response's body, until the body or the stream ends. */
export async function* eventsOf(body) {
  const parser = new EventParser();
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      for (const data of parser.push(value)) {
        if (data === "[DONE]") return;
        yield data;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // after an abort there is nothing left to cancel
  }
}
