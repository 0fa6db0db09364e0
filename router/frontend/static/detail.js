// The timeline of one request, in a dialog: bars, the same as a table, and where it was computed.

import { byId, h } from "/page/dom.js";
import { failure, key } from "/page/stream.js";
import { bytes, count, guesses, ms, plural, short } from "/page/words.js";

const AGAIN_MS = 500; // while it runs
const NAMES = {
  received: "received", tokenized: "tokenized", admitted: "admitted", placed: "placed on workers", prefill_queued: "at the prefill worker",
  fetched: "cached pages fetched", prefill_started: "prefill started", prefill_done: "prefill done", first_token: "first token",
  granted: "pages granted", landed: "KV landed", committed: "KV checked", decode_joined: "joined the decode batch", finished: "finished",
};
const PARTS = [ // stage: from which moments (the first there is), until which
  ["queue", "Queue", ["received"], ["prefill_started"]],
  ["prefill", "Prefill", ["prefill_started"], ["first_token"]],
  ["handoff", "Hand-off", ["prefill_done", "first_token", "granted"], ["committed", "landed"]],
  ["decode", "Decode", ["decode_joined", "first_token"], ["finished"]],
];
let open = "";

export function startDetail() {
  byId("detail-close").addEventListener("click", () => byId("detail").close());
  byId("detail").addEventListener("close", () => { open = ""; });
  byId("detail").addEventListener("click", (event) => { if (event.target === byId("detail")) byId("detail").close(); });
}

export async function showDetail(id) {
  open = id;
  byId("detail-title").textContent = `Request ${short(id)}`;
  byId("detail-body").replaceChildren(h("p.quiet", {}, "Loading …"));
  if (!byId("detail").open) byId("detail").showModal();
  while (open === id) {
    const known = await load(id);
    if (open !== id) return;
    byId("detail-body").replaceChildren(...(known.error ? [h("p", {}, known.error)] : parts(known)));
    if (known.error || known.status) return;
    await new Promise((resolve) => { setTimeout(resolve, AGAIN_MS); });
  }
}

async function load(id) {
  try {
    const response = await fetch(`/page/requests/${id}${location.search}`, { headers: key.headers(), cache: "no-store" });
    return response.ok ? await response.json() : { error: (await failure(response)).message };
  } catch {
    return { error: "The router cannot be reached." };
  }
}

/** Return [stage, name, from, until] in milliseconds for each stage that was begun. */
export function spans(ledger, lastMs) {
  const at = Object.fromEntries((ledger.steps ?? []).map((step) => [step.name, step.at_ms ?? 0]));
  const first = (names) => names.map((name) => at[name]).find((value) => value !== undefined);
  return PARTS.map(([stage, name, from, until]) => [stage, name, first(from), first(until) ?? lastMs])
    .filter(([, , from, until]) => from !== undefined && until !== undefined && until >= from);
}

function parts(known) {
  const ledger = known.ledger ?? {};
  const steps = (ledger.steps ?? []).map((step) => [step.name, step.at_ms ?? 0]);
  const end = Math.max(0.001, ...steps.map(([, at]) => at));
  const firstToken = steps.find(([name]) => name === "first_token")?.[1];
  const usage = known.usage ?? known;
  const facts = [
    ["Id", known.request_id],
    ["State", known.status ? (known.status === "OK" ? "answered" : `${known.status}: ${known.message ?? ""}`) : `in ${known.stage}${known.waits_for ? `: ${known.waits_for}` : ""}`],
    ["Prompt", `${plural(usage.prompt_tokens ?? 0, "token")}${usage.cached_tokens ? `, ${count(usage.cached_tokens)} from the prefix cache` : ""}`],
    ["Answer", plural(usage.completion_tokens ?? usage.answer_tokens ?? 0, "token")],
    ["Workers", [ledger.prefill_worker, ledger.decode_worker || known.decode_worker].filter((name, i, all) => name && all.indexOf(name) === i).join(" → ") || "none yet"],
    ["Placed", `${ledger.decision ?? ""}${ledger.attempts > 1 ? ` (${ledger.attempts} times)` : ""}`],
    ["TTFT", firstToken === undefined ? "" : `${ms(firstToken)}${predicted(ledger.predicted_ttft_ms)}${asked(known.slo?.ttft_ms)}`],
    ["TPOT", ledger.tpot_ms ? `${ms(ledger.tpot_ms)}${predicted(ledger.predicted_tpot_ms)}${asked(known.slo?.tpot_ms)}` : ""],
    ["Hand-off", Number(ledger.handoff_bytes) ? `${bytes(Number(ledger.handoff_bytes))} in ${ms(ledger.handoff_ms ?? 0)}${ledger.handoff_pages_reused ? `, ${plural(ledger.handoff_pages_reused, "page")} already there` : ""}` : ""],
    ["Fetched", ledger.fetched_tokens ? `${plural(ledger.fetched_tokens, "token")} from ${ledger.fetched_from}` : ""],
    ["Moves", (ledger.moves ?? []).map((move) => `${move.source} → ${move.target} after ${plural(move.num_tokens ?? 0, "token")}`).join("; ")],
    ["Guesses", guesses(ledger.drafts).map(([source, right, all, places]) => `${source}: ${count(right)} of ${count(all)} right${places.length > 1 ? ` (${places.map(count).join(", ")} by place)` : ""}`).join("; ")],
  ].filter(([, value]) => value);
  return [
    h("div.bars", { role: "img", "aria-label": spans(ledger, end).map(([, name, from, until]) => `${name} from ${ms(from)} to ${ms(until)}`).join("; ") }, ...spans(ledger, end).map((span) => bar(span, end))),
    h("dl.facts", {}, ...facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    h("h3", {}, "Stages"),
    table(steps),
    ...(firstToken === undefined ? [] : [h("p.quiet", {}, `The steps up to the first token add up to ${ms(firstToken)}, which is the TTFT.`)]),
  ];
}

const predicted = (value) => (value ? `, ${ms(value)} predicted` : "");
const asked = (value) => (value ? `, ${ms(value)} asked for` : "");

function bar([stage, name, from, until], end) {
  const fill = h("span.fill", { "data-stage": stage });
  fill.style.left = `${(from / end) * 100}%`;
  fill.style.width = `${Math.max(0.6, ((until - from) / end) * 100)}%`;
  return h("div.bar-row", {}, h("span", {}, name), h("span.track", {}, fill), h("span.num", {}, ms(until - from)));
}

function table(steps) {
  const rows = steps.map(([name, at], i) => h("tr", {}, h("th", { scope: "row" }, NAMES[name] ?? name), h("td.num", {}, ms(at)), h("td.num", {}, i ? `+${ms(at - steps[i - 1][1])}` : "")));
  return h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Stage"), h("th.num", { scope: "col" }, "at"), h("th.num", { scope: "col" }, "after the one before"))), h("tbody", {}, ...rows));
}
