// The list of all versions: filtered, sorted, and updated in place once per frame of the browser.

import { loadForm } from "./actions.js";
import { el, setText } from "./dom.js";
import { bytes, milliseconds, number, orNothing } from "./format.js";
import { keyOfVersion } from "./live.js";

// Each column: its title, the value to sort by, and the text of its cell.
const COLUMNS = [
  { title: "Model", value: (row) => row.name, text: (row) => row.name },
  { title: "Version", value: (row) => Number(row.version), text: (row) => row.version },
  { title: "State", value: (row) => row.state, text: (row) => stateOf(row) },
  { title: "Provider", value: (row) => row.provider, text: (row) => providerOf(row) },
  { title: "Requests/s", value: (row) => row.rate, text: (row) => orNothing(row.rate), isNumber: true },
  { title: "p50", value: (row) => row.p50, text: (row) => milliseconds(row.p50), isNumber: true },
  { title: "p99", value: (row) => row.p99, text: (row) => milliseconds(row.p99), isNumber: true },
  { title: "Rows/batch", value: (row) => row.batch, text: (row) => orNothing(row.batch), isNumber: true },
  { title: "Queue", value: (row) => row.queue, text: (row) => orNothing(row.queue), isNumber: true },
  { title: "Refused/s", value: (row) => row.refused, text: (row) => orNothing(row.refused), isNumber: true },
  { title: "Failed/s", value: (row) => row.failed, text: (row) => orNothing(row.failed), isNumber: true },
  { title: "Files", value: (row) => row.file_bytes, text: (row) => bytes(row.file_bytes), isNumber: true },
];

/** The state of a version in words, with what its load is doing or why it failed. */
export function stateOf(row) {
  const state = row.state.toLowerCase();
  return row.why ? `${state}: ${row.why}` : state;
}

function providerOf(row) {
  const provider = row.provider || row.platform;
  return row.elsewhere ? `${provider}; elsewhere: ${row.elsewhere}` : provider;
}

/** The address of the view of a version. */
export function addressOf(row) {
  return `#/models/${encodeURIComponent(row.name)}/${encodeURIComponent(row.version)}`;
}

export class ModelsView {
  title = "Models";
  #live;
  #rows = new Map();
  #sortBy = 0;
  #isDescending = false;
  #isDue = false;
  #body = el("tbody");
  #load = el("div");
  #summary = el("p", { role: "status" });
  #filter = el("input", { type: "search", id: "filter", autocomplete: "off", spellcheck: "false" });
  #heads = [];
  #onModels = () => this.#schedule();

  constructor(live) {
    this.#live = live;
    this.#filter.addEventListener("input", this.#onModels);
    this.#heads = COLUMNS.map((column, index) =>
      el(
        "th",
        { scope: "col", class: column.isNumber ? "number" : "" },
        el("button", { type: "button", onclick: () => this.#sort(index) }, column.title),
      ),
    );
    this.element = el(
      "div",
      {},
      el("h1", {}, "Models"),
      el("p", { class: "row" }, el("label", { for: "filter" }, "Filter by name or state"), this.#filter),
      this.#summary,
      el(
        "div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": "Models" },
        el("table", { class: "models" }, el("thead", {}, el("tr", {}, this.#heads)), this.#body),
      ),
      this.#load,
    );
    live.addEventListener("models", this.#onModels);
    this.#schedule();
  }

  close() {
    this.#live.removeEventListener("models", this.#onModels);
  }

  #sort(index) {
    this.#isDescending = this.#sortBy === index ? !this.#isDescending : Boolean(COLUMNS[index].isNumber);
    this.#sortBy = index;
    this.#schedule();
  }

  #schedule() {
    if (this.#isDue) return;
    this.#isDue = true;
    requestAnimationFrame(() => {
      this.#isDue = false;
      this.#draw();
    });
  }

  #draw() {
    if (this.#live.server.loads_models && !this.#load.firstChild) this.#load.append(loadForm());
    const all = [...this.#live.models.values()];
    const wanted = this.#filter.value.trim().toLowerCase();
    const found = all.filter((row) => `${row.name} ${row.state}`.toLowerCase().includes(wanted));
    found.sort((one, other) => this.#compare(one, other));
    const drawn = new Map();
    for (const row of found) {
      const key = keyOfVersion(row.name, row.version);
      drawn.set(key, this.#drawRow(row, this.#rows.get(key)));
    }
    this.#rows = drawn;
    this.#place([...drawn.values()].map(({ element }) => element));
    this.#heads.forEach((head, index) => {
      if (index === this.#sortBy) head.setAttribute("aria-sort", this.#isDescending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    setText(this.#summary, this.#summarize(all, found.length));
  }

  #summarize(all, shown) {
    if (!all.length) return "No models.";
    const ready = all.filter((row) => row.state === "READY").length;
    const failed = all.filter((row) => row.state === "FAILED").length;
    const rate = all.reduce((sum, row) => sum + row.rate, 0);
    const parts = [`${all.length} versions`, `${ready} ready`, `${failed} failed`, `${number(rate)} requests/s`];
    return shown < all.length ? `${shown} of ${parts.join(", ")}` : parts.join(", ");
  }

  #compare(one, other) {
    const { value } = COLUMNS[this.#sortBy];
    const [a, b] = this.#isDescending ? [value(other), value(one)] : [value(one), value(other)];
    if (a !== b) return a < b ? -1 : 1;
    return one.name < other.name ? -1 : one.name > other.name ? 1 : Number(one.version) - Number(other.version);
  }

  #drawRow(row, before) {
    if (before?.row === row) return before;
    const drawn = before ?? makeRow(row);
    drawn.row = row;
    COLUMNS.forEach((column, index) => setText(drawn.cells[index], column.text(row)));
    drawn.element.className = row.state.toLowerCase();
    return drawn;
  }

  /** Bring the rows into this order and touch only those that move. */
  #place(elements) {
    let next = this.#body.firstChild;
    for (const element of elements) {
      if (element === next) next = next.nextSibling;
      else this.#body.insertBefore(element, next);
    }
    while (next) {
      const following = next.nextSibling;
      next.remove();
      next = following;
    }
  }
}

function makeRow(row) {
  const link = el("a", { href: addressOf(row) });
  const cells = COLUMNS.map((column, index) => (index ? el("td", { class: column.isNumber ? "number" : "" }) : link));
  const head = el("th", { scope: "row" }, link);
  return { row: null, cells, element: el("tr", {}, head, cells.slice(1)) };
}
