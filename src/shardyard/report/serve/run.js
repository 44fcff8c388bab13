// One run: links to its pages, its events, and the end of its logs.

import { ask, askAgain, askOnce, byId, count, element, fill } from "./api.js";

const SHOWN = 200;

export class RunPanel {
  constructor(onClose) {
    this.id = null;
    byId("run-close").addEventListener("click", onClose);
    byId("event-kind").addEventListener("change", () => this.#drawEvents());
    for (const name of ["log-attempt", "log-rank"]) {
      byId(name).addEventListener("change", () => this.#readLog(name));
    }
  }

  async open(id, isMoving) {
    this.id = id;
    this.answer = null;
    byId("run").hidden = id === null;
    if (id === null) return;
    byId("run-title").textContent = id;
    for (const name of ["log-attempt", "log-rank", "event-kind"]) byId(name).replaceChildren();
    for (const name of ["events", "log", "run-pages", "run-findings", "events-more"]) byId(name).replaceChildren();
    if (isMoving) {
      byId("run-title").focus({ preventScroll: true });
      byId("run").scrollIntoView({ block: "start" });
    }
    await this.refresh(true);
  }

  async refresh(isNew = false) {
    const id = this.id, read = isNew ? ask : askAgain, query = new URLSearchParams({ run: id });
    if (id === null) return;
    const [pages, events] = await Promise.all([read(`/api/pages?${query}`), read(`/api/events?${query}`)]);
    if (this.id !== id) return;
    if (pages) this.#drawPages(pages);
    if (events) {
      this.answer = events;
      const kinds = [...new Set(events.events.map((event) => event.kind))].sort();
      fill(byId("event-kind"), ["", ...kinds], (kind) => kind || "all");
      this.#drawEvents();
    }
    await this.#readLog(null, read);
    if (isNew) await this.#readFindings(id);
  }

  // What the report says about waits and memory: it takes all steps of the run.
  async #readFindings(id) {
    const found = await askOnce(`/api/findings?${new URLSearchParams({ run: id })}`);
    if (this.id === id) byId("run-findings").replaceChildren(...found.map((text) => element("li", text)));
  }

  #drawPages(pages) {
    byId("run-pages").replaceChildren(...pages.flatMap(({ title, address }) => {
      const link = element("a", title);
      link.href = address;
      link.target = "_blank";
      link.rel = "noopener";
      return [link, " "];
    }));
  }

  #drawEvents() {
    if (!this.answer) return;
    const kind = byId("event-kind").value;
    const found = this.answer.events.filter((event) => !kind || event.kind === kind);
    byId("events").replaceChildren(...found.slice(0, SHOWN).map((event) => {
      const line = element("tr"), name = element("th");
      name.scope = "row";
      name.append(element("code", event.kind, "kind"));
      const when = event.t === null ? "" : new Date(event.t * 1000).toLocaleString();
      line.append(name, element("td", when, "k"), element("td", event.words, "w"));
      return line;
    }));
    const more = found.length - Math.min(found.length, SHOWN);
    const older = this.answer.total - this.answer.events.length;
    byId("events-more").textContent = count(this.answer.total, "event")
      + (more ? `, the newest ${SHOWN} of ${found.length} shown; choose a kind to see others` : "")
      + (older ? `; ${older} older ones are only in events.jsonl` : "");
  }

  async #readLog(changed, read = ask) {
    const id = this.id, query = new URLSearchParams({ run: id });
    const [attempt, rank] = [byId("log-attempt").value, byId("log-rank").value];
    if (attempt) query.set("attempt", attempt);
    if (rank && changed !== "log-attempt") query.set("rank", rank);
    const log = await read(`/api/log?${query}`);
    if (this.id !== id || !log) return;
    fill(byId("log-attempt"), log.attempts);
    fill(byId("log-rank"), log.ranks);
    if (log.attempt !== null) byId("log-attempt").value = String(log.attempt);
    if (log.rank !== null) byId("log-rank").value = String(log.rank);
    const box = byId("log"), isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 30;
    box.textContent = log.text || "No log of this rank is in the folder of the run.";
    if (isAtEnd || changed !== null) box.scrollTop = box.scrollHeight;
  }
}
