// A chart of curves on a canvas: axes with titles, crosshair with the values of all runs, smoothing.

import { COLOURS, element, short, tipLine } from "./api.js";

const MOST_IN_TIP = 14, MOST_WITH_RAW = 12, MOST_WITH_DOTS = 60, MOST_WITH_DASHES = 40;
const MARGIN = { left: 66, right: 14, top: 10, bottom: 38 };

// Colours of the theme, each read once: a reading makes the browser style the whole page.
const colours = new Map();
export function theme(name) {
  if (!colours.has(name)) {
    colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  }
  return colours.get(name);
}
export const forgetTheme = () => colours.clear();
export const colourOf = (slot) => theme(`--s${slot % COLOURS}`);

// Calls action(width, height) when an element has been laid out, and after each change of its size.
const sizeActions = new Map();
const sizes = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) sizeActions.get(target)(contentRect.width, contentRect.height);
});
export function onSize(target, action) {
  sizeActions.set(target, action);
  sizes.observe(target);
}

// Calls action(isNear) when an element comes near the screen or leaves it.
const nearActions = new Map();
const nearness = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) nearActions.get(target)(isIntersecting);
}, { rootMargin: "150px 0px" });
export function onNear(target, action) {
  nearActions.set(target, action);
  nearness.observe(target);
}

function linearTicks(low, high, most) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((each) => each >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step);
  return found;
}

function ticks(low, high, most, isLog) {
  if (!isLog) return linearTicks(low, high, most);
  const found = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++) {
    for (const k of [1, 2, 5]) found.push(k * 10 ** power);
  }
  const inside = found.filter((each) => each >= low && each <= high);
  if (inside.length < 3) return linearTicks(low, high, most).filter((each) => each > 0);
  const decades = inside.filter((each) => Math.log10(each) % 1 === 0);
  return inside.length > 2 * most && decades.length > 1 ? decades : inside;
}

// Exponential mean without the pull of the beginning towards 0.
export function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0, share = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return sum / share;
  });
}

// Index of the point next to a place on the x axis.
function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - xs[low - 1] <= xs[low] - x ? low - 1 : low;
}

export function sized(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = "12px system-ui, sans-serif";
  return pen;
}

// Beside the crosshair, on the side with more room, and inside the chart.
export function placeTip(tip, place, width) {
  tip.style.left = "0";
  const { offsetWidth } = tip, left = place > width / 2 ? place - offsetWidth - 12 : place + 12;
  tip.style.left = `${Math.max(0, Math.min(left, width - offsetWidth))}px`;
}

export class Chart {
  // spec: key, title, unit, isSmoothed, scale: largest value -> [divisor, unit].
  // onCursor(x, chart) is called with a place on the x axis, or with null; onNear(chart) when the
  // chart comes near the screen. It is drawn only there.
  constructor(spec, { onCursor, onLog, onNear: comesNear }) {
    this.spec = spec;
    this.series = [];
    this.view = { xTitle: "", smoothing: 0, isLog: false, strong: null };
    this.figure = element("figure");
    this.figure.hidden = true;
    this.figure.dataset.metric = spec.key;
    this.log = element("button", "log");
    this.log.type = "button";
    this.log.setAttribute("aria-label", `log: logarithmic scale of ${spec.title}`);
    this.log.addEventListener("click", () => onLog(spec.key));
    const caption = element("figcaption", spec.title);
    caption.append(this.log);
    this.canvas = element("canvas");
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", spec.title);
    this.canvas.tabIndex = 0;
    this.overlay = element("canvas");
    this.overlay.setAttribute("aria-hidden", "true");
    this.overlay.style.pointerEvents = "none";
    this.tip = element("div", undefined, "tip");
    this.tip.hidden = true;
    this.isNear = this.isStale = this.isMarked = false;
    this.width = 0;
    const plot = element("div", undefined, "plot");
    onSize(plot, (width, height) => {
      [this.width, this.height] = [width, height];
      this.draw();
    });
    onNear(this.figure, (isNear) => {
      this.isNear = isNear;
      if (!isNear) return;
      if (this.isStale) this.draw();
      comesNear(this);
    });
    plot.append(this.canvas, this.overlay, this.tip);
    this.figure.append(caption, plot);
    plot.addEventListener("pointermove", (event) => {
      onCursor(this.placeOf(event.clientX - plot.getBoundingClientRect().left), this);
    });
    plot.addEventListener("pointerleave", () => onCursor(null, this));
    this.canvas.addEventListener("blur", () => onCursor(null, this));
    this.canvas.addEventListener("keydown", (event) => this.#onKey(event, onCursor));
  }

  // series: id, label, slot, x, y of each run, without runs that have no value. isExpected: values of the
  // metric exist, and are read once the chart is near.
  update(series, view, isExpected) {
    this.series = series;
    this.view = view;
    this.figure.hidden = !series.length && !isExpected;
    this.draw();
  }

  draw() {
    this.isStale = !this.isNear || !this.width;
    if (this.isStale || this.figure.hidden) return;
    const { isLog, smoothing } = this.view;
    const weight = this.spec.isSmoothed ? smoothing : 0;
    this.log.setAttribute("aria-pressed", String(isLog));
    this.lines = this.series.map((one) => ({ ...one, smooth: smoothed(one.y, weight) }));
    this.#fit(weight);
    const { pen } = this.frame;
    this.#drawAxes(pen);
    const raw = weight && this.lines.length <= MOST_WITH_RAW;
    for (const line of this.lines) {
      if (raw) this.#drawLine(pen, line, line.y, 0.25);
    }
    const order = [...this.lines].sort((a, b) => (a.id === this.view.strong) - (b.id === this.view.strong));
    for (const line of order) this.#drawLine(pen, line, line.smooth, 1);
    this.canvas.setAttribute("aria-label", this.#words());
    this.#clearCursor();
  }

  #clearCursor() {
    this.tip.hidden = true;
    if (this.isMarked) sized(this.overlay, this.width, this.height);
    this.isMarked = false;
  }

  // Ranges of both axes, and from values to pixels.
  #fit(weight) {
    const { isLog } = this.view;
    let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
    const withRaw = weight && this.lines.length <= MOST_WITH_RAW;
    for (const { x, y, smooth } of this.lines) {
      for (let k = 0; k < x.length; k++) {
        const value = smooth[k];
        if (value === null || (isLog && value <= 0)) continue;
        const low = withRaw && !(isLog && y[k] <= 0) ? Math.min(y[k], value) : value;
        const high = withRaw ? Math.max(y[k], value) : value;
        if (x[k] < x0) x0 = x[k];
        if (x[k] > x1) x1 = x[k];
        if (low < y0) y0 = low;
        if (high > y1) y1 = high;
      }
    }
    if (y0 > y1) [x0, x1, y0, y1] = [0, 1, isLog ? 1 : 0, isLog ? 10 : 1];
    if (x1 <= x0) x1 = x0 + (Math.abs(x0) || 1) * 1e-3;
    const [divisor, unit] = this.spec.scale?.(y1) ?? [1, this.spec.unit];
    [y0, y1] = [y0 / divisor, y1 / divisor];
    if (isLog) [y0, y1] = [y0 / 1.05, y1 * 1.05];
    else {
      const air = (y1 - y0) * 0.05 || Math.abs(y1) * 0.1 || 1;
      const touchesZero = y0 >= 0 && y0 - air < 0;
      [y0, y1] = [touchesZero ? 0 : y0 - air, y1 + air];
    }
    const { width, height } = this, pen = sized(this.canvas, width, height);
    const project = isLog ? Math.log10 : (value) => value;
    const [low, high] = [project(y0), project(y1)];
    const { left, right, top, bottom } = MARGIN;
    this.frame = {
      pen, width, height, x0, x1, y0, y1, divisor, unit,
      px: (x) => left + (x - x0) / (x1 - x0) * (width - left - right),
      py: (y) => height - bottom - (project(y / divisor) - low) / (high - low) * (height - top - bottom),
    };
  }

  #drawAxes(pen) {
    const { width, height, x0, x1, y0, y1, divisor, unit, px, py } = this.frame;
    pen.strokeStyle = theme("--line");
    pen.fillStyle = theme("--muted");
    pen.lineWidth = 1;
    pen.textAlign = "right";
    for (const at of ticks(y0, y1, 5, this.view.isLog)) {
      const y = py(at * divisor);
      pen.beginPath(); pen.moveTo(MARGIN.left, y); pen.lineTo(width - MARGIN.right, y); pen.stroke();
      pen.fillText(short(Number(at.toPrecision(6))), MARGIN.left - 6, y + 4);
    }
    const most = Math.max(2, Math.floor((width - MARGIN.left) / 75));
    pen.textAlign = "center";
    for (const at of ticks(x0, x1, most, false)) {
      const text = short(Number(at.toPrecision(6)));
      const rightmost = width - 2 - pen.measureText(text).width / 2;
      pen.fillText(text, Math.min(px(at), rightmost), height - MARGIN.bottom + 15);
    }
    pen.fillText(this.view.xTitle, (MARGIN.left + width - MARGIN.right) / 2, height - 6);
    pen.save();
    pen.translate(12, (MARGIN.top + height - MARGIN.bottom) / 2);
    pen.rotate(-Math.PI / 2);
    pen.fillText(unit, 0, 0);
    pen.restore();
  }

  #drawLine(pen, line, values, opacity) {
    const { px, py } = this.frame, { isLog, strong } = this.view;
    const isKnown = (value) => value !== null && value !== undefined && !(isLog && value <= 0);
    const isWeak = strong !== null && line.id !== strong;
    pen.strokeStyle = pen.fillStyle = colourOf(line.slot);
    pen.globalAlpha = isWeak ? opacity * 0.2 : opacity;
    pen.lineWidth = line.id === strong ? 2.5 : 1.5;
    // among many lines dashes tell none apart, and take most of the time
    const dashes = this.lines.length > MOST_WITH_DASHES ? [] : [[], [6, 3], [2, 3], [9, 3, 2, 3]];
    pen.setLineDash(dashes[Math.floor(line.slot / COLOURS) % 4] ?? []);
    pen.beginPath();
    const dots = line.x.length <= MOST_WITH_DOTS && opacity === 1;
    for (let k = 0; k < line.x.length; k++) {
      if (!isKnown(values[k])) continue;
      const x = px(line.x[k]), y = py(values[k]), hasBefore = k > 0 && isKnown(values[k - 1]);
      if (hasBefore) pen.lineTo(x, y); else pen.moveTo(x, y);
      if (dots || (!hasBefore && !isKnown(values[k + 1]))) pen.fillRect(x - 1.5, y - 1.5, 3, 3);
    }
    pen.stroke();
    pen.globalAlpha = 1;
    pen.setLineDash([]);
  }

  placeOf(pixel) {
    if (!this.frame) return null;
    const { width, x0, x1 } = this.frame;
    const share = (pixel - MARGIN.left) / (width - MARGIN.left - MARGIN.right);
    return x0 + Math.min(1, Math.max(0, share)) * (x1 - x0);
  }

  // Values of all runs at a place, the largest first.
  valuesAt(x) {
    const near = (this.frame.x1 - this.frame.x0) * 0.01;
    return this.lines.flatMap((line) => {
      const index = nearest(line.x, x);
      const isInside = line.x.length && x >= line.x[0] - near && x <= line.x.at(-1) + near;
      if (!isInside || line.y[index] === null) return [];
      return [{ ...line, at: line.x[index], value: line.y[index], smooth: line.smooth[index] }];
    }).sort((a, b) => b.value - a.value);
  }

  text(value) {
    return `${short(value / this.frame.divisor, 5)}`;
  }

  showCursor(x, isActive) {
    this.#clearCursor();
    if (this.figure.hidden || !this.frame || !this.isNear) return;
    if (x === null || x < this.frame.x0 || x > this.frame.x1) return;
    const found = this.valuesAt(x);
    if (!found.length) return;
    const { width, height } = this, pen = sized(this.overlay, width, height);
    this.isMarked = true;
    const place = this.frame.px(x);
    pen.strokeStyle = theme("--muted");
    pen.beginPath(); pen.moveTo(place, MARGIN.top); pen.lineTo(place, height - MARGIN.bottom); pen.stroke();
    for (const each of found.slice(0, 100)) {
      if (this.view.isLog && each.smooth <= 0) continue;
      pen.fillStyle = colourOf(each.slot);
      pen.beginPath();
      pen.arc(this.frame.px(each.at), this.frame.py(each.smooth), 3.2, 0, 7);
      pen.fill();
    }
    if (isActive) this.#showTip(found, place);
  }

  #showTip(found, place) {
    const isSmooth = this.spec.isSmoothed && this.view.smoothing > 0;
    const lines = found.slice(0, MOST_IN_TIP).map((each) => tipLine(each.slot, each.label,
      this.text(each.value) + (isSmooth ? ` (${this.text(each.smooth)})` : "")));
    const nearby = found[0].at;
    const head = `${this.view.xTitle}: ${short(nearby, 6)} · ${this.frame.unit}`;
    const more = found.length - lines.length;
    this.tip.replaceChildren(element("b", head), ...lines,
      ...(more > 0 ? [element("span", `and ${more} more`, "muted")] : []));
    this.tip.hidden = false;
    placeTip(this.tip, place, this.frame.width);
  }

  #onKey(event, onCursor) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") onCursor(null, this);
    if (!(event.key in moves) || !this.frame) return;
    event.preventDefault();
    const { x0, x1 } = this.frame, step = (x1 - x0) / (event.shiftKey ? 10 : 50);
    const from = this.keyPlace ?? x0;
    this.keyPlace = Math.min(x1, Math.max(x0, from + moves[event.key] * step));
    onCursor(this.keyPlace, this, true);
  }

  #words() {
    const last = this.lines.slice(0, 6).map((line) => {
      const value = line.y.findLast((each) => each !== null);
      return value === undefined ? null : `${line.label} ${this.text(value)}`;
    }).filter(Boolean);
    return `${this.spec.title} in ${this.frame.unit} over ${this.view.xTitle}, `
      + `${this.lines.length} runs. Latest: ${last.join(", ")}. Arrow keys read values.`;
  }
}
