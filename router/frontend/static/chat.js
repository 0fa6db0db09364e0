// A small chat over this server's own /v1/chat/completions, which shows the way of each of its requests.

import { byId, h, text } from "/page/dom.js";
import { events, failure, key } from "/page/stream.js";
import { STAGES, ms, plural } from "/page/words.js";

export const own = new Set(); // ids of this page's requests
let turns = []; // what is sent with the next message
const ways = new Map(); // by id: where the way of a request is shown
let running = null; // what stops the answer that is being written
let model = "";
let announce = () => {};
let choose = () => {};

export function startChat(tools) {
  ({ announce, choose } = tools);
  byId("chat-form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  byId("chat-text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  byId("chat-stop").addEventListener("click", () => running?.abort());
  byId("chat-clear").addEventListener("click", () => {
    running?.abort();
    turns = [];
    byId("chat-log").replaceChildren();
    byId("chat-text").focus();
  });
}

/** Show where this page's requests are. */
export function showOwn(state) {
  model = state.facts?.model ?? "";
  for (const [id, way] of ways) {
    const request = state.requests?.[id];
    const ended = request ? null : Object.values(state.ended ?? {}).find((each) => each.request_id === id);
    const passed = (request ?? ended)?.passed;
    if (passed) showWay(way, passed, request?.stage);
    if (ended) ways.delete(id);
  }
}

const REACHED = { queue: ["received"], prefill: ["prefill_started"], handoff: ["granted", "committed"], decode: ["decode_joined"] };

function showWay(way, passed, stage) {
  for (const item of way.children) {
    const name = item.dataset.stage;
    // One worker may do all of it: then the hand-off is left out, and it decodes from its first token on.
    const was = REACHED[name].some((each) => passed.includes(each)) || (name === "decode" && passed.includes("first_token"));
    item.classList.toggle("passed", was);
    if (stage === name) item.setAttribute("aria-current", "step");
    else item.removeAttribute("aria-current");
    text(item.lastChild, stage === name ? ", now" : was ? ", passed" : ", not yet");
  }
}

async function send() {
  const words = byId("chat-text").value.trim();
  if (!words || running) return;
  byId("chat-text").value = "";
  const conversation = turns; // "New chat" begins another one
  const asked = { role: "user", content: words };
  const answer = h("div.words");
  const about = h("p.about", {}, h("span", {}, "waits …"), " ");
  const way = h("ol.way", { "aria-label": "Stages of this request" }, ...STAGES.map(([stage, name]) => h("li", { "data-stage": stage }, name, h("span.unseen", {}, ", not yet"))));
  const log = byId("chat-log");
  log.append(h("div.turn.you", {}, h("p.who", {}, "You"), h("div.words", {}, words)), h("div.turn.it", {}, h("p.who", {}, model || "model"), answer, way, about));
  log.scrollTop = log.scrollHeight;
  setRunning(new AbortController());
  const [told, content] = await read([...conversation, asked], answer, about, way);
  if (content) conversation.push(asked, { role: "assistant", content });
  setRunning(null);
  announce(told);
}

/** Ask, and write the answer as it comes; return what is to be announced of it, and what later turns are sent of it. */
async function read(messages, answer, about, way) {
  const began = performance.now();
  const seen = { first: null, last: null, tokens: 0, id: "", content: "" };
  const log = byId("chat-log");
  try {
    const body = {
      model, messages, stream: true, stream_options: { include_usage: true },
      max_tokens: byId("chat-max").valueAsNumber || 128, temperature: byId("chat-temperature").valueAsNumber || 0,
    };
    const headers = { "Content-Type": "application/json", "X-Begin": "at-once", ...key.headers() };
    const response = await fetch("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal: running.signal });
    if (!response.ok) throw await failure(response);
    begin(response.headers.get("x-pdserve-request-id"), way, seen);
    for await (const [, data] of events(response)) {
      if (data === "[DONE]") break;
      take(JSON.parse(data), answer, seen);
      const isLow = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
      if (isLow) log.scrollTop = log.scrollHeight;
      showFigures(about, seen, began, "");
    }
    showFigures(about, seen, began, "");
    return [`The answer has ${plural(seen.tokens, "token")}.`, seen.content];
  } catch (error) {
    const why = error.name === "AbortError" ? "stopped" : `failed: ${error.message}`;
    showFigures(about, seen, began, why);
    return [`The answer was ${why}.`, why === "stopped" ? seen.content : ""];
  }
}

function begin(id, way, seen) {
  if (!id) return;
  seen.id = id;
  own.add(id);
  ways.set(id, way);
}

function take(chunk, answer, seen) {
  if (chunk.error) throw new Error(chunk.error.message ?? "the router ended it");
  const delta = chunk.choices?.[0]?.delta;
  const gained = (delta?.reasoning_content ?? "") + (delta?.content ?? "");
  if (gained) {
    seen.first ??= performance.now();
    seen.last = performance.now();
    answer.append(gained);
    seen.content += delta.content ?? "";
  }
  seen.tokens = chunk.usage?.completion_tokens ?? seen.tokens;
}

function showFigures(about, seen, began, why) {
  const parts = [];
  if (seen.first !== null) parts.push(`TTFT ${ms(seen.first - began)}`);
  if (seen.tokens > 1 && seen.last > seen.first) parts.push(`TPOT ${ms((seen.last - seen.first) / (seen.tokens - 1))}`);
  if (seen.tokens) parts.push(plural(seen.tokens, "token"));
  if (why) parts.push(why);
  text(about.firstChild, parts.join(" · ") || "waits …");
  if (seen.id && !about.querySelector("button")) {
    about.append(h("button.plain", { type: "button", onclick: () => choose(seen.id) }, "Timeline"));
  }
}

function setRunning(control) {
  running = control;
  byId("chat-stop").disabled = !control;
  byId("chat-send").disabled = Boolean(control);
}
