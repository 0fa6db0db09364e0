// The page as a whole: its stream, its theme, its key, and what it says aloud.

import { lastMinute, showPredicted, showTrend, startCharts } from "/page/charts.js";
import { own, showOwn, startChat } from "/page/chat.js";
import { showDetail, startDetail } from "/page/detail.js";
import { byId, h, text } from "/page/dom.js";
import { showFlow, startFlow } from "/page/flow.js";
import { isQuiet, showEnded, showNews, showRefusals, showTiles, told } from "/page/lists.js";
import { showPools, startPools } from "/page/pools.js";
import { Stream, key } from "/page/stream.js";
import { clock, plural } from "/page/words.js";

const ANNOUNCE_MS = 5000; // at most one announcement in so long
const CHARTS_MS = 1000; // between two drawings of the key figures and charts

let shown = {}; // the last state, as far as differences to it are shown
let waiting = null; // the state that is drawn next
let chartsMs = 0;
let lastKey = 0; // of the happenings that were announced
const sayings = [];
let saysMs = 0;

function announce(words) {
  sayings.push(words);
  if (sayings.length > 1) return;
  setTimeout(() => {
    const said = sayings.splice(0);
    saysMs = Date.now();
    text(byId("announcer"), said.slice(0, 3).join(" ") + (said.length > 3 ? ` And ${said.length - 3} more.` : ""));
  }, Math.max(100, saysMs + ANNOUNCE_MS - Date.now()));
}

function onState(state, isSnapshot) {
  const keys = Object.keys(state.happenings ?? {}).map(Number);
  if (isSnapshot) lastKey = 0; // a router that was started again counts anew
  else {
    for (const each of keys.filter((number) => number > lastKey)) {
      const happening = state.happenings[each];
      if (happening.kind !== "move" && !isQuiet(happening)) announce(`${told(happening)}.`);
    }
  }
  lastKey = Math.max(lastKey, ...keys, 0);
  if (!waiting) requestAnimationFrame(draw);
  waiting = state;
}

function draw() {
  const state = waiting;
  waiting = null;
  text(byId("model"), state.facts?.model ?? "");
  document.title = `pdserve ${state.facts?.model ?? ""}`.trim();
  text(byId("foot"), `Shown by ${state.facts?.router ?? "the router"}. Prompts and answers of requests are never shown here, only their lengths and times.`);
  showModels(Object.keys(state.models ?? {}));
  showFlow(state, own);
  showPools(state, shown);
  showOwn(state);
  showEnded(state, own, showDetail);
  showNews(state);
  showRefusals(state);
  if (Date.now() > chartsMs + CHARTS_MS) {
    chartsMs = Date.now();
    showTiles(state);
    showVerdict(state);
    showTrend(state);
    showPredicted(state);
  }
  shown = { workers: { ...state.workers } };
}

/** Link to the pages of the other models at this address. */
function showModels(others) {
  const nav = byId("models");
  if (nav.dataset.shown === others.join("\n")) return;
  nav.dataset.shown = others.join("\n");
  nav.hidden = !others.length;
  nav.replaceChildren(...others.flatMap((name) => [" ", h("a", { href: `/?model=${encodeURIComponent(name)}` }, name)]));
}

function showVerdict(state) {
  const workers = Object.values(state.workers ?? {});
  const { attainment } = lastMinute(state);
  const ready = `${workers.filter((each) => each.state === "ready").length} of ${plural(workers.length, "worker")} ready`;
  text(byId("verdict"), attainment === null ? ready : `${ready} · ${Math.round(attainment * 100)} % in time`);
}

function onLink(state, { message = "", delayMs = 0 } = {}) {
  const link = byId("link");
  if (link.dataset.state === state && state === "live") return;
  const last = stream.lastMs ? ` Last news at ${clock(stream.lastMs)}.` : "";
  if (state === "live" && link.dataset.state === "cut") announce("Connected again.");
  link.dataset.state = state;
  document.body.dataset.link = state;
  text(byId("link-text"), { live: "Live", cut: "Not connected", denied: "A key is needed" }[state]);
  byId("cut").hidden = state !== "cut";
  if (state === "cut") text(byId("cut-text"), `The router cannot be reached${message ? ` (${message})` : ""}: what is shown is not of now.${last} Next try in ${Math.ceil(delayMs / 1000)} s.`);
  if (state === "denied") askForKey(key.get() ? "The router does not know this key." : "This router asks its clients for a key.");
}

function askForKey(why) {
  byId("key-button").hidden = false;
  text(byId("key-why"), why);
  byId("key").value = "";
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

function startTheme() {
  const theme = byId("theme");
  theme.value = localStorage.getItem("pdserve-theme") ?? "auto";
  document.documentElement.dataset.theme = theme.value;
  theme.addEventListener("change", () => {
    localStorage.setItem("pdserve-theme", theme.value);
    document.documentElement.dataset.theme = theme.value;
  });
}

const stream = new Stream(onState, onLink);
startTheme();
startFlow(showDetail);
startPools();
startCharts();
startDetail();
startChat({ announce, choose: showDetail });
byId("retry").addEventListener("click", () => stream.wake());
byId("key-button").addEventListener("click", () => askForKey("Another key may be used instead."));
byId("key-form").addEventListener("submit", () => { key.set(byId("key").value.trim()); stream.wake(); });
byId("news-kind").addEventListener("change", () => showNews(stream.state));
addEventListener("online", () => stream.wake());
stream.run();
