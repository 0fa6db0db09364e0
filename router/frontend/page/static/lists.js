// Key figures, and lists of what has ended, happened, and was refused.

import { attribute, byId, h, keyed, text } from "/page/dom.js";
import { lastMinute } from "/page/charts.js";
import { CAUSES, clock, count, median, met, ms, short } from "/page/words.js";

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
    ["Goodput", `${goodput.toFixed(1)}/s`, `of ${ended.toFixed(1)}/s that ended`],
    ["Attainment", attainment === null ? "–" : `${Math.round(attainment * 100)} %`, attainment === null ? "no objectives asked for" : "of the last minute"],
    ["TTFT", ms(median(answered.map((each) => each.ttft_ms))), "median of the last 50"],
    ["TPOT", ms(median(answered.filter((each) => each.tpot_ms).map((each) => each.tpot_ms))), `${count(Math.round(tokens))} tokens/s`],
  ];
  keyed(byId("tiles"), tiles.map(([name, ...rest]) => [name, rest]), (name) => h("div.tile", {}, h("dt", {}, name), h("dd.figure"), h("dd.quiet")),
    (tile, [figure, about]) => { text(tile.children[1], figure); text(tile.children[2], about); });
}

export function showEnded(state, own, choose) {
  const rows = Object.entries(state.ended ?? {}).sort(([a], [b]) => b - a).slice(0, SHOWN);
  byId("ended-none").hidden = rows.length > 0;
  keyed(byId("ended"), rows, () => h("tr"), (row, ended) => {
    if (row.firstChild) return; // what has ended does not change
    const id = ended.request_id;
    const isMet = met(ended);
    const outcome = ended.status === "OK" ? (isMet === false ? "late" : "answered") : ended.status === "CANCELLED" ? "client left" : "refused";
    const sign = { answered: "✓", late: "△", refused: "✕", "client left": "–" }[outcome];
    const why = ended.because ? CAUSES[ended.because] ?? ended.because : ended.status === "OK" || ended.status === "CANCELLED" ? "" : ended.status;
    const workers = [ended.prefill_worker, ended.decode_worker].filter((name, i, all) => name && all.indexOf(name) === i).join(" → ");
    row.append(
      h("td", {}, clock(ended.unix_time_ms)),
      h("td", {}, h("button.plain", { type: "button", onclick: () => choose(id), "aria-label": `Timeline of request ${short(id)}` }, short(id)), own.has(id) ? h("span.badge", {}, "yours") : ""),
      h("td", { class: `outcome ${outcome.replace(" ", "-")}`, title: ended.message }, h("span", { "aria-hidden": "true" }, `${sign} `), why ? `${outcome}: ${why}` : outcome),
      h("td.num", {}, count(ended.prompt_tokens)), h("td.num", {}, count(ended.completion_tokens)),
      h("td.num", {}, ended.ttft_ms ? ms(ended.ttft_ms) : "–", h("span.quiet", {}, ended.predicted_ttft_ms ? `, ${ms(ended.predicted_ttft_ms)}` : "")),
      h("td.num", {}, ended.tpot_ms ? ms(ended.tpot_ms) : "–", h("span.quiet", {}, ended.predicted_tpot_ms ? `, ${ms(ended.predicted_tpot_ms)}` : "")),
      h("td", {}, workers + (ended.attempts > 1 ? ` (placed ${ended.attempts} times)` : "") + (ended.moves ? ` (moved ${ended.moves}×)` : "")),
    );
  });
}

const SIGNS = { attached: "+", ready: "●", role: "⇄", drain: "▽", move: "→", scaling: "↕", warning: "!" };

export function showNews(state) {
  const kinds = byId("news-kind").value;
  const wanted = (kind) => !kinds || kinds.split(" ").includes(kind);
  const rows = Object.entries(state.happenings ?? {}).filter(([, each]) => wanted(each.kind)).sort(([, a], [, b]) => b.unix_time_ms - a.unix_time_ms).slice(0, SHOWN);
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
    text(row.children[0], `${count(number)} `);
    text(row.children[1], `${CAUSES[cause] ?? cause}`);
    const last = ended.filter((each) => each.because === cause && each.status !== "OK").at(-1);
    text(row.children[2], last ? `Last at ${clock(last.unix_time_ms)}: ${last.message}` : "");
  });
}
