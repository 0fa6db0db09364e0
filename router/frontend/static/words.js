// Figures and names as people read them.

const NUMBER = new Intl.NumberFormat("en");
const TIME = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export const STAGES = [
  ["queue", "Queue", "waits for a worker, or for its prompt's turn there"],
  ["prefill", "Prefill", "its prompt is computed"],
  ["handoff", "Hand-off", "its KV pages move to the worker that decodes it"],
  ["decode", "Decode", "its answer is generated"],
];
export const PAGES = [
  ["held", "held by requests"],
  ["granted", "granted to hand-offs"],
  ["cached", "cached prefixes, free"],
  ["quarantined", "quarantined"],
  ["free", "free"],
];
export const CAUSES = {
  queue: "prompts before it", prefill: "computing its prompt", fetch: "fetching pages of its prompt",
  handoff: "its hand-off", batch: "sequences that decode beside it", prompts: "prompts computed on decode workers",
  pages: "no free pages on decode workers", rows: "full decode batches", reserved: "time left to hand-offs",
  idle_cluster: "objective out of reach even when idle", no_prefill: "no prefill worker", no_decode: "no decode worker",
  no_pair: "no pair of workers fits", slots: "as many requests as may be placed", turn: "others before it",
  tenant_requests: "more requests than its tenant may send", tenant_tokens: "more tokens than its tenant may use",
  tenant_concurrency: "as many requests of its tenant as may be under way",
  invalid: "a wrong field", no_key: "no API key", wrong_key: "an unknown API key", model: "another model than the served one",
  preparing: "too many prompts or grammars being prepared", compiler: "the process that compiles grammars",
  deadline: "its deadline", cancelled: "its client has left", slow_reader: "a client that reads too slowly",
  lost_workers: "workers that were lost", failed: "it fails on every worker", suspect: "it is suspected of ending workers",
  shutting_down: "shutting down", no_router: "no router", internal: "an error of the router",
};

export const count = (value) => NUMBER.format(value);
export const clock = (unixMs) => TIME.format(new Date(Number(unixMs)));
export const short = (id) => id.slice(0, 6);
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** Milliseconds with three figures, as seconds from 10 s on. */
export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 ms";
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  return value >= 100 ? `${Math.round(value)} ms` : `${value.toFixed(value >= 10 ? 1 : 2)} ms`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB"];
  let unit = 0;
  for (; value >= 1000 && unit < 3; unit += 1) value /= 1000;
  return `${value >= 100 || !unit ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

/** Return [source, how many were right, of how many, of these at each place] of guesses that steps have verified. */
export function guesses(drafts) {
  return Object.entries(drafts ?? {}).map(([source, { num_draft_tokens: all = 0, num_accepted_tokens_per_pos: places = [] }]) =>
    [source, places.reduce((sum, each) => sum + each, 0), all, places]);
}

export function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)];
}
