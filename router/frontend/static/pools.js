// Workers by pool, each with a picture of its pages: a cell stands for so many of them.

import { attribute, byId, h, keyed, s, text } from "/page/dom.js";
import { PAGES, clock, count, ms, plural } from "/page/words.js";

const COLUMNS = 20;
const ROWS = 5;
const CELL = 10; // units of the picture, of which a cell fills all but two
const GONE_MS = 20000; // for which a worker that has left is still shown
const ROLES = [["prefill", "Prefill pool"], ["decode", "Decode pool"], ["mixed", "Mixed workers"]];
const STATES = { ready: "ready", loading: "loading", draining: "draining", unusable: "not used", gone: "gone" };
const gone = new Map(); // by name: what was last known, and when it left

export function startPools() {
  for (const [kind, meaning] of PAGES) {
    const sample = s("svg", { width: 14, height: 14, "aria-hidden": "true" }, s("rect", { class: `pages ${kind}`, x: 1, y: 1, width: 12, height: 12, rx: 2 }));
    byId("pages-legend").append(h("li", {}, sample, meaning));
  }
}

export function showPools(state, before) {
  const now = Date.now();
  const workers = state.workers ?? {};
  for (const [name, worker] of Object.entries(before.workers ?? {})) {
    if (!(name in workers) && !gone.has(name)) gone.set(name, { ...worker, state: "gone", left: now });
  }
  for (const [name, worker] of gone) if (name in workers || now > worker.left + GONE_MS) gone.delete(name);
  const shown = Object.entries({ ...Object.fromEntries(gone), ...workers }).sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
  const pools = ROLES.map(([role, title]) => [role, { title, workers: shown.filter(([, worker]) => worker.role === role) }]);
  keyed(byId("pools"), pools.filter(([, pool]) => pool.workers.length), makePool, updatePool);
}

function makePool(role) {
  return h("section.pool", { "data-role": role, "aria-labelledby": `pool-${role}` }, h("h3", { id: `pool-${role}` }, ""), h("ul.workers"));
}

function updatePool(element, { title, workers }) {
  const there = workers.filter(([, worker]) => worker.state !== "gone");
  text(element.firstChild, `${title}: ${plural(there.length, "worker")}`);
  keyed(element.lastChild, workers, makeWorker, updateWorker);
}

function makeWorker(name) {
  const picture = s("svg", { class: "waffle", role: "img", viewBox: `0 0 ${COLUMNS * CELL} ${ROWS * CELL}` });
  for (const [kind] of PAGES) picture.append(s("path", { class: `pages ${kind}` }));
  return h("li.worker", { "data-worker": name },
    h("div.worker-head", {}, h("h4", {}, name), h("span.state", {}, h("span.shape", { "aria-hidden": "true" }), h("span", {}))),
    picture, h("dl.load", {}, ...["Running", "Queued", "Last step"].flatMap((term) => [h("div", {}, h("dt", {}, term), h("dd"))])), h("p.pages-text"), h("p.why"));
}

function updateWorker(element, worker) {
  const [head, picture, load, pages, why] = element.children;
  attribute(element, "data-state", worker.state);
  attribute(element, "data-process", worker.process);
  const state = worker.state === "loading" ? `loading ${Math.round(worker.loaded * 100)} %` : STATES[worker.state];
  text(head.lastChild.lastChild, state + (worker.silent_s > 2 && worker.state !== "gone" ? `, silent for ${worker.silent_s} s` : ""));
  drawPages(picture, worker);
  const sizes = PAGES.filter(([kind]) => kind !== "free" && worker.pages[kind]).map(([kind]) => `${count(worker.pages[kind])} ${kind}`);
  text(pages, `${count(worker.num_pages)} pages of ${worker.page_size} tokens: ${[...sizes, `${count(worker.pages.free)} free`].join(", ")}${worker.handoffs ? `; ${plural(worker.handoffs, "hand-off")} under way` : ""}`);
  const figures = [`${count(worker.running)} of ${count(worker.max_running)}`, count(worker.waiting), worker.step_ms ? ms(worker.step_ms) : "–"];
  figures.forEach((figure, i) => text(load.children[i].lastChild, figure));
  text(why, worker.state === "gone" ? `left at ${clock(worker.left)}` : worker.state === "ready" ? (worker.epoch ? `role changed ${worker.epoch === 1 ? "once" : `${worker.epoch} times`}` : "") : worker.why);
}

function drawPages(picture, worker) {
  const cells = COLUMNS * ROWS;
  const total = Math.max(1, worker.num_pages);
  let at = 0;
  let sum = 0;
  PAGES.forEach(([kind], i) => {
    const pages = worker.pages[kind];
    sum += pages;
    // At least a cell for what there is, so that a single quarantined page is seen.
    const until = kind === "free" ? cells : Math.min(cells, Math.max(at + (pages ? 1 : 0), Math.round((sum / total) * cells)));
    let path = "";
    for (; at < until; at += 1) path += `M${(at % COLUMNS) * CELL + 1} ${Math.floor(at / COLUMNS) * CELL + 1}h8v8h-8z`;
    attribute(picture.children[i], "d", path);
  });
  attribute(picture, "aria-label", `Pages: ${PAGES.map(([kind]) => `${count(worker.pages[kind])} ${kind}`).join(", ")}`);
}
