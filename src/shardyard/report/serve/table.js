// The list of runs: filter, sorting, and a column for each setting that differs.

import { ago, byId, element, mark, nameOf, short } from "./api.js";

const FIRST = 40, PAGE = 300;
export const COLUMNS = [
  { key: "id", title: "Run" },
  { key: "state", title: "State" },
  { key: "step", title: "Step", isNumber: true },
  { key: "loss", title: "Train loss", isNumber: true },
  { key: "eval_loss", title: "Validation loss", isNumber: true },
  { key: "tokens_per_s", title: "Tokens/s", isNumber: true },
  { key: "updated_t", title: "Changed", isNumber: true, text: ago },
];

export const textOf = (value) => (typeof value === "number" ? short(value) : String(value ?? ""));

const COMPARISONS = {
  "<": (a, b) => a < b, ">": (a, b) => a > b, "<=": (a, b) => a <= b, ">=": (a, b) => a >= b,
  "=": (a, b) => a === b,
};

// Test of one word of the filter: part of an id, a state, or a comparison with a column.
function wordTest(word, valueOf) {
  const found = word.match(/^([\w.-]+)(<=|>=|=|<|>)(.+)$/);
  if (!found) return (row) => row.id.toLowerCase().includes(word) || row.state === word;
  const [, name, sign, wanted] = found, number = Number(wanted);
  return (row) => {
    const value = valueOf(row, name);
    if (value === null || value === undefined) return false;
    if (typeof value === "number" && !Number.isNaN(number)) return COMPARISONS[sign](value, number);
    return sign === "=" && String(value).toLowerCase() === wanted;
  };
}

export function filtered(rows, filter, valueOf) {
  const tests = filter.toLowerCase().split(/\s+/).filter(Boolean).map((word) => wordTest(word, valueOf));
  return rows.filter((row) => tests.every((test) => test(row)));
}

// Rows by a column; a minus before its name: the largest first. Unknown values come last.
export function sorted(rows, sort, valueOf) {
  if (!sort) return rows;
  const name = sort.replace(/^-/, ""), sign = sort.startsWith("-") ? -1 : 1;
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b
    : String(a).localeCompare(String(b), "en", { numeric: true }));
  return rows.map((row) => [valueOf(row, name), row]).sort(([a], [b]) => {
    const known = [a, b].map((each) => each !== null && each !== undefined);
    return known[0] && known[1] ? sign * compare(a, b) : known[1] - known[0];
  }).map(([, row]) => row);
}

export class Table {
  // on: choose(id, isChosen), open(id), sort(name).
  constructor(on, valueOf) {
    this.on = on;
    this.valueOf = valueOf;
    this.lines = new Map();
    this.most = FIRST;  // until the first charts are drawn
    this.shape = "";
    byId("more").addEventListener("click", () => { this.most += PAGE; this.update(...this.last); });
  }

  showFirstPage() {
    if (this.most !== FIRST) return;
    this.most = PAGE;
    this.update(...this.last);
  }

  // rows: in their order. columns: names of settings. chosen: id -> slot.
  update(rows, columns, chosen, sort) {
    this.last = [rows, columns, chosen, sort];
    const all = [...COLUMNS, ...columns.map((key) => ({ key, title: key, isSetting: true }))];
    const shape = columns.join(" ");
    if (shape !== this.shape) this.lines.clear();
    this.shape = shape;
    this.#heads(all, sort);
    const shown = rows.slice(0, this.most);
    const made = shown.map((row) => this.#line(row, all, chosen));
    const body = byId("rows"), hasMoved = made.length !== body.children.length
      || made.some((line, k) => line !== body.children[k]);
    if (hasMoved) {
      const focused = document.activeElement;  // moving a row takes its focus
      body.replaceChildren(...made);
      if (focused?.isConnected && made.some((line) => line.contains(focused))) focused.focus();
    }
    if (this.lines.size > 2 * this.most + PAGE) {
      const ids = new Set(shown.map((row) => row.id));
      for (const id of this.lines.keys()) if (!ids.has(id)) this.lines.delete(id);
    }
    const left = rows.length - shown.length;
    byId("more").hidden = left === 0;
    byId("more").textContent = `Show ${Math.min(PAGE, left)} more of ${left}`;
  }

  #heads(all, sort) {
    const name = (sort ?? "").replace(/^-/, ""), direction = sort?.startsWith("-") ? "descending" : "ascending";
    const signature = `${this.shape} ${sort}`;
    if (this.headSignature === signature) return;
    this.headSignature = signature;
    const focused = document.activeElement?.dataset?.column;
    byId("heads").replaceChildren(...all.map(({ key, title, isNumber, isSetting }) => {
      const head = element("th", undefined, isNumber || isSetting ? "n" : "");
      head.scope = "col";
      const button = element("button", title + (key === name ? (direction === "ascending" ? " ↑" : " ↓") : ""));
      button.type = "button";
      button.dataset.column = key;
      button.addEventListener("click", () => this.on.sort(key));
      if (key === name) head.setAttribute("aria-sort", direction);
      head.append(button);
      return head;
    }));
    if (focused) document.querySelector(`#heads [data-column="${CSS.escape(focused)}"]`)?.focus();
  }

  #line(row, all, chosen) {
    let line = this.lines.get(row.id);
    if (!line) {
      line = this.#newLine(row, all);
      this.lines.set(row.id, line);
    }
    const slot = chosen.get(row.id), { box, colour, badge, cells } = line.parts;
    box.checked = slot !== undefined;
    if (colour.dataset.slot !== String(slot)) {
      colour.dataset.slot = String(slot);
      colour.replaceChildren(...(slot === undefined ? [] : [mark(slot)]));
    }
    if (badge.textContent !== row.state) {
      badge.textContent = row.state;
      badge.className = `badge ${row.state}`;
    }
    for (const [key, cell, text] of cells) {
      const words = (text ?? textOf)(this.valueOf(row, key));
      if (cell.textContent !== words) cell.textContent = words;
    }
    return line;
  }

  #newLine(row, all) {
    const line = element("tr"), head = element("th"), name = element("div", undefined, "name");
    head.scope = "row";
    const box = element("input"), open = element("button"), colour = element("span");
    box.type = "checkbox";
    box.setAttribute("aria-label", `Chart ${row.id}`);
    box.addEventListener("change", () => this.on.choose(row.id, box.checked));
    open.type = "button";
    open.append(nameOf(row.id));
    open.title = row.id;
    open.addEventListener("click", () => this.on.open(row.id));
    name.append(box, colour, open);
    head.append(name);
    const badge = element("span"), state = element("td");
    state.append(badge);
    line.append(head, state);
    const cells = all.slice(2).map(({ key, isSetting, text }) => {
      const value = this.valueOf(row, key);
      const cell = element("td", undefined, `n${isSetting ? " setting" : ""}`);
      if (isSetting) cell.title = String(value ?? "");
      line.append(cell);
      return [key, cell, text];
    });
    line.parts = { box, colour, badge, cells };
    return line;
  }
}
