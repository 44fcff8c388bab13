// The page of `shardyard serve`: charts of the chosen runs, a list of all, and one run in detail.
// The view is in the address (#...), so that it can be shared as a link.

import { askAgain, askOnce, byId, count, element, fill, mark, nameOf } from "./api.js";
import { Chart, forgetTheme } from "./charts.js";
import { Parallel } from "./parallel.js";
import { RunPanel } from "./run.js";
import { filtered, sorted, Table, textOf } from "./table.js";

const EVERY_MS = 2000, AGES_EVERY_MS = 20000;
const FIRST_RUNS = 5, MOST_CHARTED = 200, AT_ONCE = 100, FIRST_COLUMNS = 6, MOST_AXES = 8, MOST_COMPARED = 12;

const bytes = (most) => (most >= 2 ** 30 ? [2 ** 30, "GiB"] : [2 ** 20, "MiB"]);
const percent = () => [0.01, "%"];
const METRICS = [
  { key: "loss", title: "Training loss", unit: "nats", isSmoothed: true },
  { key: "eval_loss", title: "Validation loss", unit: "nats" },
  { key: "tokens_per_s", title: "Throughput", unit: "tokens/s", isSmoothed: true },
  { key: "mfu", title: "MFU", unit: "%", scale: percent, isSmoothed: true },
  { key: "peak_memory_bytes", title: "Peak memory of a device", unit: "GiB", scale: bytes },
  { key: "grad_norm", title: "Gradient norm", unit: "norm before clipping", isSmoothed: true },
  { key: "lr", title: "Learning rate", unit: "learning rate" },
  { key: "utilisation", title: "Device utilisation", unit: "%", scale: percent, isSmoothed: true },
  { key: "step_time_s", title: "Step time", unit: "s", isSmoothed: true },
  { key: "data_wait_s", title: "Wait for data", unit: "s", isSmoothed: true },
  { key: "eval_top1", title: "Validation accuracy (top-1)", unit: "%", scale: percent },
  { key: "eval_masked_accuracy", title: "Validation accuracy (masked)", unit: "%", scale: percent },
  { key: "expert_load", title: "Busiest expert", unit: "times the mean", isSmoothed: true },
  { key: "loss_scale", title: "Loss scale", unit: "factor" },
];
const X_TITLES = { step: "step", hours: "time since the start, h", tokens: "tokens", samples: "samples", epoch: "epochs" };

const view = { x: "step", smoothing: 0, logs: new Set(), filter: "", sort: "", open: null, columns: null, label: "" };
const chosen = new Map();  // id -> slot of a colour
const empty = () => new Map(METRICS.map(({ key }) => [key, new Map()]));
let data = empty();  // metric -> id -> curve
let loaded = empty();  // metric -> id -> what its curve was read at
const expected = new Set(["loss"]);  // metrics that have values
let rows = [], settings = { names: [], runs: {} }, settingIndex = new Map();
let strong = null, hasBegun = false, isLoading = false, mustLoad = false, settingsOf = null;

// --- the view in the address ---------------------------------------------------------------------

function readHash() {
  const found = new URLSearchParams(location.hash.slice(1));
  view.x = found.get("x") in X_TITLES ? found.get("x") : "step";
  view.smoothing = Math.min(0.99, Math.max(0, Number(found.get("smooth")) || 0));
  view.logs = new Set(found.getAll("log"));
  view.filter = found.get("filter") ?? "";
  view.sort = found.get("sort") ?? "";
  view.open = found.get("open");
  view.label = found.get("label") ?? "";
  view.columns = found.has("column") ? new Set(found.getAll("column").filter(Boolean)) : null;
  byId("x").value = view.x;
  byId("smooth").value = view.smoothing;
  byId("smooth-value").value = view.smoothing;
  byId("filter").value = view.filter;
  if (found.has("run")) {
    hasBegun = true;
    chosen.clear();
    for (const id of found.getAll("run").filter(Boolean).slice(0, MOST_CHARTED)) addRun(id);
  }
}

function writeHash() {
  const found = new URLSearchParams();
  for (const id of chosen.keys()) found.append("run", id);
  if (!chosen.size) found.append("run", "");
  if (view.x !== "step") found.set("x", view.x);
  if (view.smoothing) found.set("smooth", view.smoothing);
  for (const key of view.logs) found.append("log", key);
  if (view.filter) found.set("filter", view.filter);
  if (view.sort) found.set("sort", view.sort);
  if (view.open !== null) found.set("open", view.open);
  if (view.label) found.set("label", view.label);
  if (view.columns) for (const name of view.columns.size ? view.columns : [""]) found.append("column", name);
  history.replaceState(null, "", `#${found}`);
}

// --- charts --------------------------------------------------------------------------------------

const charts = METRICS.map((spec) => new Chart(spec, {
  onCursor: moveCursor, onLog: toggleLog, onNear: () => attempt(loadCurves),
}));
byId("grid").append(...charts.map((chart) => chart.figure));

function addRun(id) {
  if (chosen.has(id) || chosen.size >= MOST_CHARTED) return;
  const used = new Set(chosen.values());
  let slot = 0;
  while (used.has(slot)) slot++;
  chosen.set(id, slot);
}

// A run in legends: its id, or its value of a setting.
function labelOf(id) {
  const index = settingIndex.get(view.label), values = settings.runs[id];
  return index === undefined || !values ? id : `${view.label.split(".").pop()} ${textOf(values[index]) || "not set"}`;
}

function drawChart(chart) {
  const { key } = chart.spec, curves = data.get(key), series = [];
  for (const [id, slot] of chosen) {
    const curve = curves.get(id);
    if (curve?.y.length) series.push({ id, label: labelOf(id), slot, ...curve });
  }
  const isExpected = expected.has(key) && [...chosen.keys()].some((id) => !loaded.get(key).has(id));
  chart.update(series, { xTitle: X_TITLES[view.x], smoothing: view.smoothing, strong,
    isLog: view.logs.has(key) }, isExpected);
}

const drawCharts = () => charts.forEach(drawChart);

function toggleLog(key) {
  if (!view.logs.delete(key)) view.logs.add(key);
  writeHash();
  drawChart(charts.find((chart) => chart.spec.key === key));
}

let cursor = null, isDrawing = false;
function moveCursor(x, active, isKey = false) {
  cursor = { x, active, isKey };
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    for (const chart of charts) chart.showCursor(cursor.x, chart === cursor.active);
    if (cursor.isKey) byId("spoken").textContent = cursor.active.tip.innerText.replace(/\n+/g, ", ");
  });
}

function drawLegend() {
  byId("legend").replaceChildren(...[...chosen].map(([id, slot]) => {
    const button = element("button");
    button.type = "button";
    button.append(mark(slot), nameOf(labelOf(id)), element("span", "×"));
    button.title = id;
    button.setAttribute("aria-label", `${labelOf(id)}×: remove ${id} from the charts`);
    const emphasise = (which) => () => { strong = which; drawCharts(); };
    button.addEventListener("pointerenter", emphasise(id));
    button.addEventListener("pointerleave", emphasise(null));
    button.addEventListener("click", () => { strong = null; choose([id], false); });
    return button;
  }));
  const compared = chosen.size > 1 && chosen.size <= MOST_COMPARED, save = byId("save");
  save.hidden = !compared;
  if (compared) save.href = `/comparison?${new URLSearchParams([...chosen.keys()].map((id) => ["run", id]))}`;
  byId("nothing").hidden = chosen.size > 0 || !hasBegun;
}

// Reads the curves of runs that are new or have changed: the loss first, then all that is near.
async function loadCurves() {
  mustLoad = true;
  if (isLoading) return;
  isLoading = true;
  try {
    while (mustLoad) {
      mustLoad = false;
      if (await load(["loss"])) await painted();  // which tells what is near
      await load(charts.filter((chart) => chart.isNear).map((chart) => chart.spec.key).filter(isOfSteps));
      await load(METRICS.map(({ key }) => key).filter((key) => !isOfSteps(key)));
    }
  } finally {
    isLoading = false;
  }
}

// Evaluations and samples of devices are few, and only their curves say whether there are any.
const isOfSteps = (key) => !key.startsWith("eval_") && key !== "utilisation";

const painted = () => new Promise((done) => {
  requestAnimationFrame(() => requestAnimationFrame(done));
  setTimeout(done, 200);  // a window that is covered paints nothing
});

// Returns whether something was to be read.
async function load(keys) {
  const stamps = new Map(rows.map((row) => [row.id, `${row.updated_t} ${row.refined} ${view.x}`]));
  const groups = new Map();  // runs that have changed -> metrics
  for (const key of keys) {
    const read = loaded.get(key);
    const changed = [...chosen.keys()].filter((id) => stamps.has(id) && read.get(id) !== stamps.get(id));
    if (changed.length) groups.set(changed.join("\n"), [...(groups.get(changed.join("\n")) ?? []), key]);
  }
  await Promise.all([...groups].map(([ids, group]) => loadGroup(group, ids.split("\n"), stamps)));
  return groups.size > 0;
}

async function loadGroup(keys, ids, stamps) {
  const target = data, before = expected.size;
  for (let k = 0; k < ids.length; k += AT_ONCE) {
    const part = ids.slice(k, k + AT_ONCE), query = new URLSearchParams({ x: view.x, of: chosen.size });
    for (const key of keys) query.append("y", key);
    for (const id of part) query.append("run", id);
    const found = await askOnce(`/api/curves?${query}`);
    if (target !== data) return;  // another axis was chosen meanwhile
    for (const key of found.metrics) expected.add(key);
    for (const key of keys) {
      for (const id of part) {
        target.get(key).set(id, found.curves[key][id]);
        loaded.get(key).set(id, stamps.get(id));
      }
    }
  }
  for (const chart of charts) if (expected.size > before || keys.includes(chart.spec.key)) drawChart(chart);
}

// --- list and sweep ------------------------------------------------------------------------------

function valueOf(row, name) {
  if (name in row) return row[name];
  const index = settingIndex.get(name);
  return index === undefined ? undefined : settings.runs[row.id]?.[index];
}

const table = new Table({
  choose: (id, isChosen) => choose([id], isChosen),
  open: (id) => openRun(id, true),
  sort: (name) => {
    view.sort = view.sort === name ? `-${name}` : view.sort === `-${name}` ? "" : name;
    writeHash();
    drawList();
  },
}, valueOf);
const parallel = new Parallel(byId("parallel"), (id) => openRun(id, true));

const shownRows = () => sorted(filtered(rows, view.filter, valueOf), view.sort, valueOf);

// Settings that differ between the shown runs, in the order of the schema.
function differing(shown) {
  return settings.names.filter((name) => {
    const index = settingIndex.get(name);
    const values = new Set();
    for (const row of shown) {
      const of = settings.runs[row.id];
      if (of) values.add(of[index]);
      if (values.size > 1) return true;
    }
    return false;
  });
}

let drawnMs = 0;
function drawList() {
  drawnMs = Date.now();
  const shown = shownRows(), names = differing(shown);
  const columns = view.columns ? names.filter((name) => view.columns.has(name)) : names.slice(0, FIRST_COLUMNS);
  table.update(shown, columns, chosen, view.sort);
  byId("shown").textContent = (shown.length === rows.length ? "" : `${count(shown.length, "run")} shown. `)
    + (chosen.size >= MOST_CHARTED ? `Charts hold at most ${MOST_CHARTED} runs.` : "");
  const running = rows.filter((row) => row.state === "running").length;
  byId("summary").textContent = `${count(rows.length, "run")}, ${running} running`;
  drawColumnBoxes(names, columns);
  drawLabelChoice(names);
  drawSweep(shown, columns);
}

function drawLabelChoice(names) {
  const values = ["", ...names], signature = values.join("\n");
  if (drawLabelChoice.signature === signature) return;
  drawLabelChoice.signature = signature;
  fill(byId("label"), values, (name) => name || "run id");
  byId("label").value = values.includes(view.label) ? view.label : "";
  byId("label").parentElement.hidden = !names.length;
  if (view.label) redrawLabels();
}

function redrawLabels() {
  drawLegend();
  drawCharts();
}

function drawColumnBoxes(names, columns) {
  byId("columns").hidden = !names.length;
  const signature = JSON.stringify([names, columns]);
  if (drawColumnBoxes.signature === signature) return;
  drawColumnBoxes.signature = signature;
  const focused = document.activeElement?.dataset?.setting;
  byId("column-boxes").replaceChildren(...names.map((name) => {
    const label = element("label"), box = element("input");
    box.type = "checkbox";
    box.dataset.setting = name;
    box.checked = columns.includes(name);
    box.addEventListener("change", () => {
      view.columns = new Set(columns);
      if (box.checked) view.columns.add(name); else view.columns.delete(name);
      writeHash();
      drawList();
    });
    label.append(box, element("span", name));
    return label;
  }));
  if (focused) document.querySelector(`[data-setting="${CSS.escape(focused)}"]`)?.focus();
}

function drawSweep(shown, columns) {
  const known = shown.filter((row) => settings.runs[row.id] && row.loss !== null);
  const isEvaluated = known.every((row) => row.eval_loss !== null);
  const lossOf = (row) => (isEvaluated ? row.eval_loss : row.loss);
  const axes = columns.slice(0, MOST_AXES - 1);
  const runs = known.map((row) => ({
    id: row.id, slot: chosen.get(row.id), values: [...axes.map((name) => valueOf(row, name)), lossOf(row)],
  }));
  byId("sweep").hidden = runs.length < 2 || !axes.length;
  if (byId("sweep").hidden) return;
  parallel.update(runs, [...axes, isEvaluated ? "validation loss" : "training loss"]);
}

function choose(ids, isChosen) {
  for (const id of ids) {
    if (isChosen) addRun(id);
    else {
      chosen.delete(id);
      for (const known of [...data.values(), ...loaded.values()]) known.delete(id);
    }
  }
  hasBegun = true;
  writeHash();
  drawAll();
  attempt(loadCurves);
}

function drawAll() {
  drawLegend();
  drawCharts();
  drawList();
}

const panel = new RunPanel(() => openRun(null));
function openRun(id, isMoving = false) {
  view.open = id;
  writeHash();
  attempt(() => panel.open(id, isMoving));
}

// --- live updates --------------------------------------------------------------------------------

async function attempt(action) {
  try {
    await action();
    byId("problem").textContent = "";
  } catch (error) {
    byId("problem").textContent = `The server does not answer: ${error.message}`;
  }
}

async function loadSettings() {
  const signature = rows.map((row) => `${row.id} ${row.state}`).join();
  if (signature === settingsOf) return;
  const found = await askAgain("/api/settings");
  settingsOf = signature;
  if (!found) return;
  settings = found;
  settingIndex = new Map(settings.names.map((name, k) => [name, k]));
  drawList();
}

async function look() {
  const found = await askAgain("/api/runs");
  if (found) {
    rows = found;
    if (!hasBegun) {
      hasBegun = true;
      for (const row of rows.filter((each) => each.step !== null).slice(0, FIRST_RUNS)) addRun(row.id);
      drawLegend();
    }
    await Promise.all([loadCurves(), Promise.resolve().then(drawList)]);
    table.showFirstPage();
    await loadSettings();
  } else if (Date.now() - drawnMs > AGES_EVERY_MS) {
    drawList();
  }
  if (panel.id !== null && rows.some((row) => row.id === panel.id)) await panel.refresh();
  document.body.dataset.looked = String(Number(document.body.dataset.looked ?? 0) + 1);
}

async function lookAgain() {
  if (!document.hidden) await attempt(look);
  setTimeout(lookAgain, EVERY_MS);
}

byId("x").addEventListener("change", () => {
  view.x = byId("x").value;
  [data, loaded] = [empty(), empty()];
  writeHash();
  attempt(loadCurves);
});
byId("smooth").addEventListener("input", () => {
  view.smoothing = Number(byId("smooth").value);
  byId("smooth-value").value = view.smoothing;
  writeHash();
  drawCharts();
});
byId("label").addEventListener("change", () => {
  view.label = byId("label").value;
  writeHash();
  redrawLabels();
});
byId("filter").addEventListener("input", () => {
  view.filter = byId("filter").value;
  writeHash();
  drawList();
});
byId("all").addEventListener("click", () => choose(shownRows().map((row) => row.id), true));
byId("none").addEventListener("click", () => choose([...chosen.keys()], false));
addEventListener("hashchange", () => {
  readHash();
  [data, loaded] = [empty(), empty()];
  drawAll();
  attempt(loadCurves);
  if (panel.id !== view.open) openRun(view.open);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  forgetTheme();
  drawCharts();
  parallel.draw();
});

readHash();
drawLegend();
if (view.open !== null) openRun(view.open);
lookAgain();
