// Requests on their way: a lane for each stage, a mark for each request, which glides when its stage changes.

import { attribute, byId, h, keyed, movesFreely, text } from "/page/dom.js";
import { STAGES, clock, count, plural, short } from "/page/words.js";

const GLIDE = { duration: 600, easing: "cubic-bezier(.3,.1,.2,1)" };
const lanes = new Map();
const places = new Map(); // where each request's mark was, and in which lane
let onChoose = () => {};

export function startFlow(choose) {
  onChoose = choose;
  for (const [stage, name, meaning] of STAGES) {
    const list = h("ul", { "aria-label": `Requests in ${name.toLowerCase()}` });
    const number = h("span.count", {}, "0");
    const more = h("p.quiet.more", {});
    const head = h("h3", {}, h("span.shape", { "aria-hidden": "true" }), `${name} `, number);
    byId("lanes").append(h("div.lane", { "data-stage": stage }, head, h("p.quiet", {}, meaning), list, more));
    lanes.set(stage, { list, number, more, head });
  }
  byId("lanes").addEventListener("keydown", move);
}

/** Show the requests. `own` are the ids of this page's own. */
export function showFlow(state, own) {
  const requests = Object.entries(state.requests ?? {});
  const counts = state.facts?.stages ?? {};
  const focused = document.activeElement?.dataset?.request;
  for (const [stage, lane] of lanes) {
    const here = requests.filter(([, request]) => request.stage === stage);
    text(lane.number, count(counts[stage] ?? here.length));
    attribute(lane.list, "class", here.length > 9 ? "dense" : here.length > 4 ? "close" : "");
    keyed(lane.list, here, (id) => mark(id), (item, request, id) => update(item.firstChild, request, id, own.has(id)));
    const hidden = (counts[stage] ?? here.length) - here.length;
    text(lane.more, hidden > 0 ? `and ${count(hidden)} more` : "");
  }
  const all = [...byId("lanes").querySelectorAll("button")];
  const current = all.find((each) => each.dataset.request === focused) ?? all[0];
  for (const each of all) each.tabIndex = each === current ? 0 : -1;
  if (focused && current?.dataset.request === focused) current.focus({ preventScroll: true });
  glide(requests);
}

function mark(id) {
  return h("li", {}, h("button", { type: "button", tabindex: "-1", "data-request": id, onclick: () => onChoose(id) },
    h("span.id", {}, short(id)), h("span.size", {})));
}

function update(button, request, id, isOwn) {
  const where = [request.prefill_worker, request.decode_worker].filter((name, i, all) => name && all.indexOf(name) === i).join(" → ");
  const name = STAGES.find(([stage]) => stage === request.stage)[1];
  const label = [
    `${isOwn ? "Your request" : "Request"} ${short(id)}`, name.toLowerCase(), where && `on ${where}`,
    plural(request.prompt_tokens, "prompt token"), plural(request.answer_tokens, "answer token"),
    request.moves ? `moved ${request.moves} times` : "", request.waits_for, `since ${clock(request.received_ms)}`,
  ].filter(Boolean).join(", ");
  attribute(button, "aria-label", label);
  attribute(button, "title", label);
  button.classList.toggle("own", isOwn);
  text(button.lastChild, `${count(request.prompt_tokens)}+${count(request.answer_tokens)}`);
}

/** Let marks that have changed lanes glide there, and what is new come from the queue, through which it has come unseen. */
function glide(requests) {
  const shown = new Set(requests.map(([id]) => id));
  for (const id of places.keys()) if (!shown.has(id)) places.delete(id);
  const animates = movesFreely() && !document.hidden && requests.length <= 64;
  for (const [id, request] of requests) {
    const before = places.get(id);
    const item = lanes.get(request.stage)?.list.known.get(id);
    if (!item) continue;
    if (before?.stage === request.stage && !animates) continue;
    const rect = item.getBoundingClientRect();
    const from = before ?? lanes.get("queue").head.getBoundingClientRect();
    if (animates && (before ? before.stage !== request.stage : request.stage !== "queue")) {
      const [dx, dy] = [from.left - rect.left, from.top - scrollY + (before ? 0 : scrollY) - rect.top];
      item.animate([{ transform: `translate(${dx}px, ${dy}px)`, zIndex: 2 }, { transform: "none", zIndex: 2 }], GLIDE);
    }
    places.set(id, { stage: request.stage, left: rect.left, top: rect.top + scrollY });
  }
}

function move(event) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const all = [...byId("lanes").querySelectorAll("button")];
  const at = all.indexOf(document.activeElement);
  if (!step || at < 0) return;
  event.preventDefault();
  const next = all[(at + step + all.length) % all.length];
  all[at].tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}
