// The page of `shardyard serve`: a list, curves of the runs that are chosen, events of one of them.
// Text from runs only ever becomes textContent.
"use strict";

const EVERY_MS = 2000;
const MOST_ROWS = 300;
const COLOURS = ["#2f6fd0", "#d97a12", "#2a9168", "#cc3f4f", "#7d5bb8", "#1a8fa0", "#e0ac1b",
  "#d671a5", "#8d6b4f", "#45a0d8", "#84552c", "#9c2c4c"];
const Y = [["loss", "loss"], ["eval_loss", "held-out loss"], ["tokens_per_s", "tokens a second"],
  ["samples_per_s", "samples a second"], ["step_time_s", "seconds of a step"], ["mfu", "MFU"],
  ["grad_norm", "gradient norm"], ["lr", "learning rate"], ["data_wait_s", "wait for data, s"],
  ["peak_memory_bytes", "peak memory, bytes"], ["eval_top1", "top-1"],
  ["eval_masked_accuracy", "masked accuracy"]];
const X = [["step", "steps"], ["tokens", "tokens"], ["samples", "samples"], ["epoch", "epochs"]];

const byId = (id) => document.getElementById(id);
const state = { rows: [], chosen: new Map(), curves: {}, opened: null, begun: false };

function fill(select, options) {
  for (const [value, words] of options) select.add(new Option(words, value));
}

// The answer of a path, or null where it is what it was.
const tags = new Map();
async function ask(path) {
  const headers = tags.has(path) ? { "If-None-Match": tags.get(path) } : {};
  const answer = await fetch(path, { headers, cache: "no-store" });
  if (answer.status === 304) return null;
  if (!answer.ok) throw new Error(await answer.text());
  tags.set(path, answer.headers.get("ETag"));
  return answer.json();
}

function short(value) {
  if (value === null || value === undefined) return "";
  if (Math.abs(value) >= 1e4) {
    const units = ["", "k", "M", "G", "T"];
    const power = Math.min(units.length - 1, Math.floor(Math.log10(Math.abs(value)) / 3));
    return (value / 1000 ** power).toPrecision(3) + " " + units[power];
  }
  return Number.isInteger(value) ? String(value) : value.toPrecision(4);
}

function ago(t) {
  if (t === null) return "";
  const s = Math.max(0, Date.now() / 1000 - t);
  if (s < 90) return Math.round(s) + " s ago";
  if (s < 5400) return Math.round(s / 60) + " min ago";
  if (s < 129600) return Math.round(s / 3600) + " h ago";
  return Math.round(s / 86400) + " days ago";
}

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function shownRows() {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  return state.rows.filter((row) => words.every(
    (word) => row.id.toLowerCase().includes(word) || row.state === word));
}

function drawRows() {
  const shown = shownRows();
  const body = byId("rows");
  const made = shown.slice(0, MOST_ROWS).map((row) => {
    const line = element("tr");
    const box = element("input");
    box.type = "checkbox";
    box.checked = state.chosen.has(row.id);
    box.setAttribute("aria-label", "curve of " + row.id);
    box.addEventListener("change", () => choose(row.id, box.checked));
    const first = element("td");
    first.append(box);
    const open = element("button", row.id);
    open.type = "button";
    open.addEventListener("click", () => { state.opened = row.id; tags.clear(); look(); });
    const name = element("td");
    name.append(open);
    const badge = element("td");
    badge.append(element("span", row.state, "badge " + row.state));
    line.append(first, name, badge, element("td", row.step === null ? "" : String(row.step), "n"),
      element("td", short(row.loss), "n"), element("td", short(row.eval_loss), "n"),
      element("td", short(row.tokens_per_s), "n"), element("td", ago(row.updated_t), "n"));
    return line;
  });
  body.replaceChildren(...made);
  byId("more").textContent = shown.length > MOST_ROWS
    ? `${shown.length - MOST_ROWS} more; narrow the list above` : "";
  const running = state.rows.filter((row) => row.state === "running").length;
  byId("summary").textContent = `${state.rows.length} runs, ${running} of them running`;
}

function choose(id, isChosen) {
  if (isChosen) {
    const used = new Set(state.chosen.values());
    let colour = COLOURS.findIndex((_, k) => !used.has(k));
    if (colour < 0) colour = state.chosen.size % COLOURS.length;
    state.chosen.set(id, colour);
  } else {
    state.chosen.delete(id);
  }
  tags.clear();
  look();
}

function ticks(low, high, count) {
  const span = high - low || Math.abs(high) || 1;
  const rough = span / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((each) => each >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(at);
  return found;
}

function drawCurves() {
  const canvas = byId("curves"), style = getComputedStyle(document.documentElement);
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.clearRect(0, 0, width, height);
  const isLog = byId("log").checked;
  const project = (value) => (isLog ? Math.log10(value) : value);
  const series = [];
  for (const [id, colour] of state.chosen) {
    const curve = state.curves[id];
    if (curve) series.push({ id, colour, x: curve.x, y: curve.y });
  }
  const xs = series.flatMap((one) => one.x);
  const ys = series.flatMap((one) => one.y.filter((y) => y !== null && (!isLog || y > 0)));
  pen.font = "12px sans-serif";
  pen.fillStyle = style.getPropertyValue("--muted");
  byId("keys").replaceChildren(...series.map((one) => {
    const key = element("span"), mark = element("i");
    mark.style.background = COLOURS[one.colour];
    key.append(mark, one.id + (one.x.length ? "" : " (nothing to draw)"));
    return key;
  }));
  if (!ys.length) {
    pen.fillText("Choose runs in the list below.", 16, 28);
    return;
  }
  const min = (all) => all.reduce((a, b) => Math.min(a, b), Infinity);
  const max = (all) => all.reduce((a, b) => Math.max(a, b), -Infinity);
  const x0 = min(xs), x1 = Math.max(max(xs), x0 + 1e-9);
  let y0 = project(min(ys)), y1 = project(max(ys));
  if (y1 - y0 < 1e-12) { y0 -= Math.abs(y0) * 0.1 || 1; y1 += Math.abs(y1) * 0.1 || 1; }
  const left = 62, right = 12, top = 10, bottom = 26;
  const px = (x) => left + (x - x0) / (x1 - x0) * (width - left - right);
  const py = (y) => height - bottom - (project(y) - y0) / (y1 - y0) * (height - top - bottom);
  pen.strokeStyle = style.getPropertyValue("--line");
  pen.lineWidth = 1;
  pen.textAlign = "right";
  for (const at of ticks(y0, y1, 5)) {
    const y = height - bottom - (at - y0) / (y1 - y0) * (height - top - bottom);
    pen.beginPath(); pen.moveTo(left, y); pen.lineTo(width - right, y); pen.stroke();
    pen.fillText(short(isLog ? 10 ** at : Number(at.toPrecision(6))), left - 6, y + 4);
  }
  pen.textAlign = "center";
  for (const at of ticks(x0, x1, 6)) pen.fillText(short(Number(at.toPrecision(6))), px(at), height - 8);
  pen.lineWidth = 1.5;
  for (const one of series) {
    pen.strokeStyle = COLOURS[one.colour];
    pen.beginPath();
    let isDown = false;
    for (let k = 0; k < one.x.length; k++) {
      const y = one.y[k];
      if (y === null || (isLog && y <= 0)) { isDown = false; continue; }
      if (isDown) pen.lineTo(px(one.x[k]), py(y)); else pen.moveTo(px(one.x[k]), py(y));
      isDown = true;
    }
    pen.stroke();
    if (one.x.length === 1) { pen.fillStyle = COLOURS[one.colour];
      pen.fillRect(px(one.x[0]) - 2, py(one.y[0]) - 2, 4, 4); }
  }
}

function drawEvents(events) {
  byId("events-section").hidden = false;
  byId("events-title").textContent = "Events of " + state.opened;
  byId("events").replaceChildren(...events.map((event) => {
    const line = element("tr");
    const when = event.t === null ? "" : new Date(event.t * 1000).toLocaleString();
    line.append(element("td", when), element("td", event.kind), element("td", event.words, "w"));
    return line;
  }));
}

async function look() {
  const begun = performance.now();
  try {
    const rows = await ask("/api/runs");
    if (rows) {
      state.rows = rows;
      if (!state.begun) {
        state.begun = true;
        for (const row of rows.filter((each) => each.step !== null).slice(0, 3)) {
          state.chosen.set(row.id, state.chosen.size);
        }
      }
    }
    drawRows();
    if (state.chosen.size) {
      const query = new URLSearchParams({ y: byId("y").value, x: byId("x").value });
      for (const id of state.chosen.keys()) query.append("run", id);
      const curves = await ask("/api/curves?" + query);
      if (curves) { state.curves = curves; drawCurves(); }
    } else {
      state.curves = {};
      drawCurves();
    }
    if (state.opened) {
      const events = await ask("/api/events?" + new URLSearchParams({ run: state.opened }));
      if (events) drawEvents(events);
    }
    byId("reading").textContent = "";
  } catch (error) {
    byId("reading").textContent = "not answered: " + error.message;
  }
  document.body.dataset.looked = String(Math.round(performance.now() - begun));
}

fill(byId("y"), Y);
fill(byId("x"), X);
for (const id of ["y", "x"]) byId(id).addEventListener("change", () => { tags.clear(); look(); });
byId("log").addEventListener("change", drawCurves);
byId("filter").addEventListener("input", drawRows);
byId("none").addEventListener("click", () => { state.chosen.clear(); tags.clear(); look(); });
window.addEventListener("resize", drawCurves);
look();
setInterval(look, EVERY_MS);
