// Requests to the server, and numbers and elements of the page.
// Text from runs only ever becomes textContent.

const tags = new Map();

// The answer of a path; null where it is the same as last time.
export async function askAgain(path) {
  const headers = tags.has(path) ? { "If-None-Match": tags.get(path) } : {};
  const answer = await fetch(path, { headers, cache: "no-store" });
  if (answer.status === 304) return null;
  if (!answer.ok) throw new Error(await answer.text());
  tags.set(path, answer.headers.get("ETag"));
  return answer.json();
}

export async function ask(path) {
  tags.delete(path);
  return askAgain(path);
}

// The answer of a path that is asked once.
export async function askOnce(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

export const byId = (id) => document.getElementById(id);

export function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

export function option(value, text) {
  const made = element("option", text);
  made.value = value;
  return made;
}

// Options of a select; the chosen one stays if it still is one.
export function fill(select, values, text = String) {
  const before = select.value;
  select.replaceChildren(...values.map((value) => option(value, text(value))));
  if (values.map(String).includes(before)) select.value = before;
}

const known = (value) => value !== null && value !== undefined;

// A number of a table or an axis: 4 digits, thousands as k, M, G.
export function short(value, digits = 4) {
  if (!known(value)) return "";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size >= 1e4) {
    const units = ["", "k", "M", "G", "T", "P"];
    const power = Math.min(units.length - 1, Math.floor(Math.log10(size) / 3));
    return `${Number((value / 1000 ** power).toPrecision(digits))} ${units[power]}`;
  }
  if (size && size < 1e-3) return value.toExponential(Math.max(0, digits - 2)).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(digits)));
}

export function ago(t) {
  if (!known(t)) return "";
  const s = Math.max(0, Date.now() / 1000 - t);
  if (s < 90) return `${Math.round(s)} s ago`;
  if (s < 5400) return `${Math.round(s / 60)} min ago`;
  if (s < 129600) return `${Math.round(s / 3600)} h ago`;
  return `${Math.round(s / 86400)} days ago`;
}

// Number.toLocaleString would load the browser's tables of languages: half a second.
const grouped = (number) => String(number).replace(/\B(?=(\d{3})+$)/g, ",");
export const count = (number, word) => `${grouped(number)} ${word}${number === 1 ? "" : "s"}`;

export const COLOURS = 10;

// The mark of a run in legends; from the second ten on its line in charts has dashes, too.
export function mark(slot) {
  const made = element("span", undefined, slot >= COLOURS ? "mark dash" : "mark");
  made.style.setProperty("--own", `var(--s${slot % COLOURS})`);
  return made;
}

// The id of a run; where there is no room, its end stays, by which runs of a sweep differ.
export function nameOf(id) {
  const made = element("span", undefined, "id");
  const cut = Math.max(Math.ceil(id.length / 2), id.length - 12);
  made.append(element("span", id.slice(0, cut)), element("span", id.slice(cut)));
  return made;
}

// A line of a tooltip.
export function tipLine(slot, id, value) {
  const line = element("div");
  line.append(mark(slot), nameOf(id), element("span", value));
  return line;
}
