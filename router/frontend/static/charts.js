// Charts of the last minutes, each with the same in words below it.

import { attribute, byId, h, s, text } from "/page/dom.js";
import { count, median } from "/page/words.js";

const BUCKET_MS = 5000;
const BUCKETS = 48;
const ENDS = [ // as stacked, from below
  ["met", "met their objectives"],
  ["plain", "had none"],
  ["missed", "missed one, or have no answer"],
];

export function startCharts() {
  for (const [kind, meaning] of ENDS) {
    const sample = s("svg", { width: 14, height: 14, "aria-hidden": "true" }, s("rect", { class: `end ${kind}`, x: 1, y: 1, width: 12, height: 12, rx: 2 }));
    byId("trend-legend").append(h("li", {}, sample, meaning));
  }
}

/** The router's time: the browser's clock may be another. */
const routerMs = (state) => Date.now() + (state.clock?.offset_ms ?? 0);

/** Add up the seconds of each bucket, the oldest first. */
function buckets(state) {
  const last = Math.ceil(routerMs(state) / BUCKET_MS);
  const sums = Array.from({ length: BUCKETS }, () => ({ met: 0, missed: 0, plain: 0, ended: 0, judged: 0, tokens: 0 }));
  for (const [at, ended, missed, judged, numMet, tokens] of Object.values(state.seconds ?? {})) {
    const sum = sums[BUCKETS - (last - Math.floor(at / BUCKET_MS))];
    if (!sum) continue;
    sum.met += numMet;
    sum.missed += missed;
    sum.plain += ended - missed - numMet;
    sum.ended += ended;
    sum.judged += judged;
    sum.tokens += tokens;
  }
  return sums;
}

/** Return goodput and attainment of the last minute, as the tiles show them. */
export function lastMinute(state) {
  const sums = buckets(state).slice(-12);
  const total = (name) => sums.reduce((sum, each) => sum + each[name], 0);
  const judged = total("judged");
  const upMs = state.clock ? routerMs(state) - state.clock.unix_time_ms + state.clock.uptime_ms : 60000;
  const seconds = Math.min(60, Math.max(1, upMs / 1000)); // a router that has just started has no whole minute
  return { goodput: total("met") / seconds, ended: total("ended") / seconds, tokens: total("tokens") / seconds, attainment: judged ? total("met") / judged : null };
}

export function showTrend(state) {
  const sums = buckets(state);
  const [width, height, lower] = [widthOf("trend-ended"), 170, 104];
  const most = Math.max(1, ...sums.map((sum) => sum.met + sum.missed + sum.plain));
  const chart = frame("trend-ended", width, height, [[0, "0"], [1, `${(most / (BUCKET_MS / 1000)).toFixed(1)}/s`]]);
  const step = (width - 44) / BUCKETS;
  sums.forEach((sum, i) => {
    let y = height - 18;
    for (const [kind] of ENDS) {
      const tall = (sum[kind] / most) * (height - 30);
      if (tall > 0) chart.append(s("rect", { class: `end ${kind}`, x: 40 + i * step, y: y - tall, width: step - 1.5, height: tall }));
      y -= tall;
    }
  });
  const { goodput, ended, attainment } = lastMinute(state);
  describe("trend-ended", `Last minute: ${ended.toFixed(1)} requests a second ended, ${goodput.toFixed(1)} of them within their objectives.`);

  const low = frame("trend-attainment", width, lower, [[0, "0 %"], [1, "100 %"]]);
  let line = "";
  sums.forEach((sum, i) => {
    if (!sum.judged) return;
    const [x, y] = [40 + (i + 0.5) * step, lower - 18 - (sum.met / sum.judged) * (lower - 30)];
    line += `${line ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    low.append(s("circle", { class: "dot", cx: x, cy: y, r: 2.4 }));
  });
  low.prepend(s("path", { class: "line", d: line || "M0 0" }));
  describe("trend-attainment", attainment === null ? "Attainment: no request of the last minute asked for objectives." : `Attainment of the last minute: ${Math.round(attainment * 100)} % of the requests with objectives.`);
}

export function showPredicted(state) {
  const ended = Object.values(state.ended ?? {}).filter((each) => each.status === "OK" && each.attempts === 1);
  scatter("ttft", "TTFT", ended.filter((each) => each.predicted_ttft_ms && each.ttft_ms).map((each) => [each.predicted_ttft_ms, each.ttft_ms, each.met]));
  scatter("tpot", "TPOT", ended.filter((each) => each.predicted_tpot_ms && each.tpot_ms).map((each) => [each.predicted_tpot_ms, each.tpot_ms, each.met]));
}

function scatter(id, name, points) {
  const [size, left, bottom] = [Math.min(300, widthOf(id)), 58, 34];
  const values = points.length ? points.flatMap(([predicted, seen]) => [predicted, seen]) : [1, 1000];
  const low = Math.floor(Math.log10(Math.max(0.1, Math.min(...values))));
  const high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...values, 1))));
  const chart = byId(id);
  attribute(chart, "viewBox", `0 0 ${size} ${size}`);
  const at = (value) => (Math.log10(Math.max(value, 10 ** low)) - low) / (high - low);
  const x = (value) => left + at(value) * (size - left - 8);
  const y = (value) => size - bottom - at(value) * (size - bottom - 8);
  const parts = [];
  for (let power = low; power <= high; power += 1) {
    const value = 10 ** power;
    parts.push(s("path", { class: "grid", d: `M${x(value)} 8V${size - bottom}M${left} ${y(value)}H${size - 8}` }));
    parts.push(s("text", { x: x(value), y: size - bottom + 14, "text-anchor": power === high ? "end" : "middle" }, tick(value)), s("text", { x: left - 5, y: y(value) + 4, "text-anchor": "end" }, tick(value)));
  }
  parts.push(s("path", { class: "line", d: `M${x(10 ** low)} ${y(10 ** low)}L${x(10 ** high)} ${y(10 ** high)}` }));
  const [endX, endY] = [x(10 ** high) - 6, y(10 ** high) + 18];
  parts.push(s("text", { x: endX, y: endY, transform: `rotate(-45 ${endX} ${endY})`, "text-anchor": "end" }, "as predicted"));
  parts.push(s("text", { x: (size + left) / 2, y: size - 3, "text-anchor": "middle", class: "axis" }, "predicted"), s("text", { x: 0, y: 0, transform: `translate(10 ${size / 2 - 10}) rotate(-90)`, "text-anchor": "middle", class: "axis" }, "seen"));
  for (const [predicted, seen, isMet] of points.slice(-200)) {
    const [px, py] = [x(predicted), y(seen)];
    parts.push(isMet === false ? s("path", { class: "point missed", d: `M${px} ${py - 4.5}l4.5 8h-9z` }) : s("circle", { class: "point", cx: px, cy: py, r: 3.2 }));
  }
  chart.replaceChildren(...parts);
  const ratio = median(points.map(([predicted, seen]) => seen / predicted));
  const said = ratio === null ? "No answered request had a prediction yet." : `${count(points.length)} requests: seen is ${ratio.toFixed(2)} times what was predicted, in the median. Triangles missed an objective.`;
  describe(id, said, `${name} seen against predicted. ${said}`);
}

/** Charts are drawn in pixels, so that their words have the size of other words. */
const widthOf = (id) => Math.max(220, Math.round(byId(id).parentElement.clientWidth));
const tick = (value) => (value >= 1000 ? `${value / 1000} s` : `${value} ms`);

function frame(id, width, height, marks) {
  const chart = byId(id);
  attribute(chart, "viewBox", `0 0 ${width} ${height}`);
  const lines = s("g");
  chart.replaceChildren(lines);
  for (const [share, label] of marks) {
    const y = height - 18 - share * (height - 30);
    lines.append(s("path", { class: "grid", d: `M40 ${y}H${width}` }), s("text", { x: 36, y: y + 4, "text-anchor": "end" }, label));
  }
  lines.append(s("text", { x: 40, y: height - 3 }, `${(BUCKETS * BUCKET_MS) / 60000} min ago`), s("text", { x: width, y: height - 3, "text-anchor": "end" }, "now"));
  return chart;
}

function describe(id, said, label = said) {
  text(byId(`${id}-text`), said);
  attribute(byId(id), "aria-label", label);
}
