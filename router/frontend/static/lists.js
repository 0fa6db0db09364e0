// Key figures, and lists of what has ended, happened, and was refused.

import { attribute, byId, h, keyed, text } from "/page/dom.js";
import { lastMinute } from "/page/charts.js";
import { CAUSES, clock, count, guesses, median, ms, short } from "/page/words.js";

const SHOWN = 60;

export function showTiles(state) {
  const facts = state.facts ?? {};
  const stages = facts.stages ?? {};
  const inPools = (stages.prefill ?? 0) + (stages.handoff ?? 0) + (stages.decode ?? 0);
  const { goodput, ended, tokens, attainment } = lastMinute(state);
  const answered = Object.values(state.ended ?? {}).filter((each) => each.status === "OK").slice(-50);
  const tiles = [
    ["Running", count(inPools), "requests in a pool"],
    ["Waiting", count(stages.queue ?? 0), "requests in queues"],
    ["Goodput", `${goodput.toFixed(1)}/s`, `of ${ended.toFixed(1)}/s that ended, ${count(Math.round(tokens))} tokens/s`],
    ["Attainment", attainment === null ? "–" : `${Math.round(attainment * 100)} %`, attainment === null ? "no objectives asked" : "of the last minute"],
    ["TTFT", ms(median(answered.map((each) => each.ttft_ms))), "median of the last 50"],
    ["TPOT", ms(median(answered.filter((each) => each.tpot_ms).map((each) => each.tpot_ms))), "median of the last 50"],
    ...guesses(state.drafts).map(([source, right, all]) => [`Guesses: ${source}`, `${Math.round((right / all) * 100)} %`, `right of ${count(all)} that steps verified`]),
  ];
  keyed(byId("tiles"), tiles.map(([name, ...rest]) => [name, rest]), (name) => h("div.tile", {}, h("dt", {}, name), h("dd.figure"), h("dd.quiet")),
    (tile, [figure, about]) => { text(tile.children[1], figure); text(tile.children[2], about); });
}

export function showEnded(state, own, choose) {
  const newest = Object.entries(state.ended ?? {}).sort(([a], [b]) => b - a).slice(0, SHOWN);
  const rows = newest.map(([, ended]) => [ended.request_id, ended]); // a router that was started again counts anew
  byId("ended-none").hidden = rows.length > 0;
  keyed(byId("ended"), rows, () => h("tr"), (row, ended) => {
    if (row.firstChild) return; // what has ended does not change
    const id = ended.request_id;
    const outcome = outcomeOf(ended);
    const sign = { answered: "✓", late: "△", refused: "✕", failed: "!", "client left": "–" }[outcome];
    const why = ended.because && ended.status !== "CANCELLED" ? CAUSES[ended.because] ?? ended.because : "";
    const workers = [ended.prefill_worker, ended.decode_worker].filter((name, i, all) => name && all.indexOf(name) === i).join(" → ");
    row.append(
      h("td", {}, clock(ended.unix_time_ms)),
      h("td", {}, h("button.plain", { type: "button", onclick: () => choose(id), "aria-label": `Timeline of request ${short(id)}` }, short(id)), own.has(id) ? h("span.badge", {}, "yours") : ""),
      h("td", { class: `outcome ${outcome.replace(" ", "-")}`, title: ended.message }, h("span", { "aria-hidden": "true" }, `${sign} `), why ? `${outcome}: ${why}` : outcome),
      h("td.num", {}, count(ended.prompt_tokens)), h("td.num", {}, count(ended.completion_tokens)),
      h("td.num", {}, ...seenAndPredicted(ended.ttft_ms, ended.predicted_ttft_ms)),
      h("td.num", {}, ...seenAndPredicted(ended.tpot_ms, ended.predicted_tpot_ms)),
      h("td", {}, workers + (ended.attempts > 1 ? ` (placed ${ended.attempts} times)` : "") + (ended.moves ? ` (moved ${ended.moves}×)` : "")),
    );
  });
}

function outcomeOf(ended) {
  if (ended.status === "OK") return ended.met === false ? "late" : "answered";
  if (ended.status === "CANCELLED") return "client left";
  return ["INTERNAL", "DEADLINE_EXCEEDED"].includes(ended.status) ? "failed" : "refused";
}

/** Two figures, with one unit where it is the same. */
function seenAndPredicted(seen, predicted) {
  if (!seen) return ["–"];
  const [number, unit] = ms(seen).split(" ");
  if (!predicted) return [`${number} ${unit}`];
  const [other, otherUnit] = ms(predicted).split(" ");
  return unit === otherUnit ? [number, h("span.quiet", {}, ` · ${other}`), ` ${unit}`] : [`${number} ${unit}`, h("span.quiet", {}, ` · ${other} ${otherUnit}`)];
}

/** Whether a decision is to do nothing: shown where one asks for decisions. */
export const isQuiet = (happening) => happening.kind === "scaling" && happening.text.includes(": hold");

const SIGNS = { attached: "+", ready: "●", role: "⇄", drain: "▽", move: "→", scaling: "↕", warning: "!" };

export function showNews(state) {
  const kinds = byId("news-kind").value;
  const wanted = (each) => (kinds ? kinds.split(" ").includes(each.kind) : !isQuiet(each));
  const rows = Object.entries(state.happenings ?? {}).filter(([, each]) => wanted(each)).sort(([, a], [, b]) => b.unix_time_ms - a.unix_time_ms).slice(0, SHOWN);
  byId("news-none").hidden = rows.length > 0;
  keyed(byId("news"), rows, () => h("li", {}, h("time"), h("span.kind"), h("span.what", {}, h("span"), h("span.reasons"))), (row, each) => {
    const [time, kind, what] = row.children;
    attribute(row, "data-kind", each.kind);
    text(time, clock(each.unix_time_ms));
    text(kind, `${SIGNS[each.kind] ?? "·"} ${each.kind}`);
    const [first, second, ...rest] = told(each).split("; ");
    text(what.firstChild, [first, second].filter(Boolean).join("; ") + (each.count > 1 ? ` (${each.count} times)` : ""));
    text(what.lastChild, rest.join("; "));
  });
}

export const told = (happening) => (happening.subject ? `${happening.subject}: ${happening.text}` : happening.text);

export function showRefusals(state) {
  const rows = Object.entries(state.refused ?? {}).filter(([, number]) => number).sort(([, a], [, b]) => b - a);
  const ended = Object.values(state.ended ?? {});
  byId("refusals-none").hidden = rows.length > 0;
  keyed(byId("refusals"), rows, () => h("li", {}, h("strong"), h("span.what"), h("p.quiet")), (row, number, cause) => {
    text(row.children[0], `${count(number)} × `);
    text(row.children[1], `${CAUSES[cause] ?? cause}`);
    const last = ended.filter((each) => each.because === cause && each.status !== "OK").at(-1);
    text(row.children[2], last ? `Last at ${clock(last.unix_time_ms)}: ${last.message}` : "");
  });
}
