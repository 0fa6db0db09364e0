// The event stream: kept open, opened again when it is cut, and never trusted for longer than its pulse.

const SILENCE_MS = 4000; // the router sends something each second
const FIRST_DELAY_MS = 500;
const LONGEST_DELAY_MS = 10000;

export const key = {
  get: () => sessionStorage.getItem("pdserve-key") ?? "",
  set: (value) => (value ? sessionStorage.setItem("pdserve-key", value) : sessionStorage.removeItem("pdserve-key")),
  headers: () => (key.get() ? { Authorization: `Bearer ${key.get()}` } : {}),
};

/** Yield what a response sends as [event, data]; a cut stream ends without an error or with one. */
export async function* events(response, onBytes = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      onBytes();
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const lines = block.split(/\r?\n/);
        const field = (name) => lines.filter((line) => line.startsWith(`${name}:`)).map((line) => line.slice(name.length + 1).trimStart());
        const data = field("data").join("\n");
        if (data) yield [field("event")[0] ?? "message", data];
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * Keep a state up to date. `onState(state, isSnapshot)` gets each one, `onLink(state, detail)` learns of "live",
 * "cut" (detail: the error, and milliseconds until the next try) and "denied" (a key is needed).
 */
export class Stream {
  constructor(onState, onLink) {
    this.onState = onState;
    this.onLink = onLink;
    this.state = {};
    this.lastMs = null; // when the last news came
    this.wake = () => {};
  }

  async run() {
    for (let failures = 0; ; ) {
      const before = this.lastMs;
      let error = null;
      let denied = false;
      try {
        await this.follow();
      } catch (caught) {
        error = caught;
        denied = caught.status === 401;
      }
      if (this.lastMs !== before) failures = 0;
      const delayMs = Math.min(LONGEST_DELAY_MS, FIRST_DELAY_MS * 2 ** failures) * (0.8 + 0.4 * Math.random());
      failures = Math.min(failures + 1, 10);
      this.onLink(denied ? "denied" : "cut", { message: error?.status ? error.message : "", delayMs });
      await new Promise((resolve) => {
        this.wake = resolve;
        if (!denied) setTimeout(resolve, delayMs);
      });
    }
  }

  async follow() {
    const control = new AbortController();
    let watchdog = 0;
    const alive = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => control.abort(), SILENCE_MS);
    };
    alive();
    try {
      const options = { headers: { Accept: "text/event-stream", ...key.headers() }, cache: "no-store", signal: control.signal };
      const response = await fetch(`/page/events${location.search}`, options);
      if (!response.ok) throw await failure(response);
      for await (const [event, data] of events(response, alive)) {
        this.take(event, JSON.parse(data));
      }
    } finally {
      clearTimeout(watchdog);
      control.abort();
    }
  }

  take(event, changes) {
    if (event === "snapshot") this.state = {};
    for (const [section, entries] of Object.entries(changes)) {
      const known = (this.state[section] ??= {});
      for (const [name, entry] of Object.entries(entries)) {
        if (entry === null) delete known[name];
        else known[name] = entry;
      }
    }
    this.lastMs = Date.now();
    if (changes.clock) this.state.clock.offset_ms = changes.clock.unix_time_ms - this.lastMs;
    this.onLink("live");
    this.onState(this.state, event === "snapshot");
  }
}

/** Make an error of a response that is none of what was asked for. */
export async function failure(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch {
    // not JSON: the status has to do
  }
  return Object.assign(new Error(message), { status: response.status });
}
