// Parallel coordinates: a line a run through the settings that differ, to its final loss.

import { element, nameOf, short, tipLine } from "./api.js";
import { colourOf, onSize, placeTip, sized, theme } from "./charts.js";

const TOP = 30, BOTTOM = 22, NEAR = 14, MOST_WORDS = 18, AXIS_PX = 118;

const isNumber = (value) => typeof value === "number";
const textOf = (value) => (isNumber(value) ? short(value, 3) : String(value ?? "not set"));

// From the values of one axis to shares of its height, and the labels of the axis.
function axisOf(title, values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  if (known.length && known.every(isNumber)) {
    const low = Math.min(...known), high = Math.max(...known), isLog = low > 0 && high / low > 20;
    const project = isLog ? Math.log10 : (value) => value;
    const span = project(high) - project(low) || 1;
    const labels = low === high ? [[low, 0.5]] : [[low, 0], [high, 1]];
    return { title: title + (isLog ? " (log)" : ""), labels: labels.map(([value, share]) => [textOf(value), share]),
      share: (value) => (isNumber(value) ? (low === high ? 0.5 : (project(value) - project(low)) / span) : null) };
  }
  const words = [...new Set(values.map(textOf))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const share = (word) => (words.length < 2 ? 0.5 : words.indexOf(word) / (words.length - 1));
  return { title, labels: words.map((word) => [word, share(word)]), share: (value) => share(textOf(value)) };
}

const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

export class Parallel {
  constructor(host, onOpen) {
    this.host = host;
    this.canvas = element("canvas");
    this.canvas.setAttribute("role", "img");
    this.tip = element("div", undefined, "tip");
    this.tip.hidden = true;
    host.append(this.canvas, this.tip);
    host.addEventListener("pointermove", (event) => {
      const box = host.getBoundingClientRect();
      this.#point(event.clientX - box.left, event.clientY - box.top);
    });
    host.addEventListener("pointerleave", () => this.#show(null));
    host.addEventListener("click", () => { if (this.near) onOpen(this.near.id); });
    this.runs = [];
    this.width = 0;
    onSize(host, (width, height) => {
      [this.width, this.height] = [width, height];
      this.draw();
    });
  }

  // runs: id, slot (undefined: not in the charts), values of the axes in order. titles: of the axes.
  update(runs, titles) {
    this.runs = runs;
    this.host.style.minWidth = `${titles.length * AXIS_PX}px`;
    this.axes = titles.map((title, k) => axisOf(title, runs.map((run) => run.values[k])));
    this.lines = runs.map((run) => ({ ...run, shares: this.axes.map((axis, k) => axis.share(run.values[k])) }));
    this.draw();
  }

  draw() {
    if (!this.runs.length || !this.width) return;
    const { width, height } = this, pen = sized(this.canvas, width, height);
    const side = Math.min(70, width * 0.12), last = this.axes.length - 1;
    this.px = (k) => side + k / Math.max(1, last) * (width - 2 * side);
    this.py = (share) => height - BOTTOM - share * (height - TOP - BOTTOM);
    const room = Math.floor((width - 2 * side) / Math.max(1, last) / 7);
    for (const line of this.lines) if (line !== this.near) this.#line(pen, line, false);
    if (this.near) this.#line(pen, this.near, true);
    pen.strokeStyle = theme("--muted");
    pen.lineWidth = 1;
    for (const [k, axis] of this.axes.entries()) {
      const x = this.px(k), isLast = k === last && last > 0;
      pen.textAlign = k === 0 ? "left" : isLast ? "right" : "center";
      const start = k === 0 ? 6 : isLast ? width - 6 : x;
      pen.fillStyle = theme("--ink");
      pen.fillText(cut(axis.title, Math.max(6, room)), start, 14);
      pen.beginPath(); pen.moveTo(x, this.py(0)); pen.lineTo(x, this.py(1)); pen.stroke();
      pen.textAlign = isLast ? "right" : "left";
      let above = Infinity;
      for (const [text, share] of axis.labels) {
        const y = this.py(share);
        if (above - y < 13) continue;  // it would be on the one below it
        above = y;
        this.#label(pen, cut(text, Math.min(MOST_WORDS, Math.max(6, room))), isLast ? x - 5 : x + 5, y + 4);
      }
    }
    const words = this.axes.map((axis) => axis.title).join(", ");
    this.canvas.setAttribute("aria-label", `Parallel coordinates of ${this.runs.length} runs: ${words}. `
      + "The table below has the same values.");
  }

  #label(pen, text, x, y) {
    pen.strokeStyle = theme("--card");
    pen.lineWidth = 4;
    pen.strokeText(text, x, y);
    pen.fillStyle = theme("--muted");
    pen.fillText(text, x, y);
    pen.strokeStyle = theme("--muted");
    pen.lineWidth = 1;
  }

  #line(pen, line, isNear) {
    pen.strokeStyle = line.slot === undefined ? theme("--muted") : colourOf(line.slot);
    pen.globalAlpha = isNear ? 1 : line.slot === undefined ? Math.max(0.12, Math.min(0.5, 20 / this.lines.length)) : 0.9;
    pen.lineWidth = isNear ? 3 : line.slot === undefined ? 1 : 1.6;
    pen.beginPath();
    let isDown = false;
    for (const [k, share] of line.shares.entries()) {
      if (share === null) { isDown = false; continue; }
      if (isDown) pen.lineTo(this.px(k), this.py(share)); else pen.moveTo(this.px(k), this.py(share));
      isDown = true;
    }
    pen.stroke();
    pen.globalAlpha = 1;
  }

  // Vertical distance of a line from a place; infinite where it is not drawn.
  #distance(line, x, y) {
    const last = this.axes.length - 1, gap = this.px(1) - this.px(0);
    const k = Math.min(last - 1, Math.max(0, Math.floor((x - this.px(0)) / gap)));
    const [a, b] = [line.shares[k], line.shares[k + 1]];
    if (a === null || b === null) return Infinity;
    const along = Math.min(1, Math.max(0, (x - this.px(k)) / gap));
    return Math.abs(this.py(a + (b - a) * along) - y);
  }

  #point(x, y) {
    let best = null, least = NEAR;
    for (const line of this.lines ?? []) {
      const far = this.#distance(line, x, y);
      if (far < least) [best, least] = [line, far];
    }
    this.#show(best, x);
  }

  #show(line, x = 0) {
    const isSame = line === this.near;
    this.near = line;
    this.tip.hidden = !line;
    if (!isSame) this.draw();
    if (!line) return;
    const values = this.axes.map((axis, k) => {
      const row = element("div");
      row.append(element("span"), element("span", axis.title), element("span", textOf(line.values[k])));
      return row;
    });
    this.tip.replaceChildren(line.slot === undefined ? nameOf(line.id) : tipLine(line.slot, line.id, ""), ...values);
    placeTip(this.tip, x, this.width);
  }
}
