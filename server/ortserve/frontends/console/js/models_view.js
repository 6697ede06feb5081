// The lists of all versions and of all rollouts. They are filtered, sorted, and updated once per frame of the browser.

import { loadForm } from "./actions.js";
import { el, section, setText } from "./dom.js";
import { bytes, milliseconds, number, orNothing, percent } from "./format.js";
import { LiveTable } from "./live_table.js";
import { addressOf, classOf, decisionOf, labelsOf, progressOf, stateOf, tailsOf } from "./versions.js";

// Columns: title, value for sorting, and text of the cell.
const NUMBERS = [
  ["Requests/s", "rate", orNothing],
  ["p50", "p50", milliseconds],
  ["p99", "p99", milliseconds],
  ["Rows/batch", "batch", orNothing],
  ["Queue", "queue", orNothing],
  ["Refused/s", "refused", orNothing],
  ["Failed/s", "failed", orNothing],
  ["Memory", "memory", (size) => (size ? bytes(size) : "")],
].map(([title, name, inWords]) => ({ title, value: (row) => row[name], text: (row) => inWords(row[name]), isNumber: true }));

/** Return the columns of the list of versions. `rolloutOf` finds the rollout of a model. */
function versionColumns(rolloutOf) {
  const labels = (row) => labelsOf(row, rolloutOf(row.name));
  const columns = [
    { title: "Model", text: (row) => row.name },
    { title: "Version", value: (row) => Number(row.version), text: (row) => row.version },
    { title: "Labels", text: labels, className: "labels" },
    { title: "State", text: stateOf, className: "state" },
    { title: "Provider", text: providerOf },
  ];
  return [...columns.map((column) => ({ value: column.text, ...column })), ...NUMBERS];
}

const ROLLOUT_COLUMNS = [
  { title: "Rollout of", text: (row) => row.name },
  { title: "Candidate", text: (row) => String(row.version), value: (row) => Number(row.version) },
  { title: "Mode", text: ({ rollout }) => rollout?.mode ?? "" },
  { title: "Share", text: ({ rollout }) => (rollout ? percent(rollout.share) : ""), value: (row) => row.rollout?.share ?? 0, isNumber: true },
  ...[
    ["Requests", "requests"],
    ["Failed", "failed"],
    ["Disagreed", "disagreed"],
  ].map(([title, name]) => ({
    title,
    text: ({ rollout, figures }) => (rollout ? number(figures[name]) : ""),
    value: ({ figures }) => figures[name],
    isNumber: true,
  })),
  { title: "p99", text: ({ figures }) => tailsOf(figures), value: ({ figures }) => figures.candidate_p99_s ?? 0 },
  { title: "State", text: progressOf },
  { title: "Last decision", text: decisionOf },
].map((column) => ({ value: column.text, ...column }));

function providerOf(row) {
  const provider = row.provider || row.platform;
  return row.elsewhere ? `${provider}; elsewhere: ${row.elsewhere}` : provider;
}

export class ModelsView {
  title = "Models";
  #live;
  #rollout = (name) => this.#live.rollouts.get(name);
  #isDue = false;
  #load = el("div");
  #summary = el("p", { role: "status" });
  #filter = el("input", { type: "search", id: "filter", autocomplete: "off", spellcheck: "false" });
  #versions;
  #rollouts;
  #rolloutRows = new Map();
  #rolloutSection;
  #onModels = () => this.#schedule();

  constructor(live) {
    this.#live = live;
    this.#filter.addEventListener("input", this.#onModels);
    this.#versions = new LiveTable("Models", versionColumns(this.#rollout), {
      addressOf: (row) => addressOf(row.name, row.version),
      classOf: (row) => `is-${classOf(row)}`,
      dependsOn: (row) => this.#rollout(row.name),
      onSort: this.#onModels,
    });
    this.#rollouts = new LiveTable("Rollouts", ROLLOUT_COLUMNS, {
      addressOf: (row) => addressOf(row.name, row.version),
      onSort: this.#onModels,
    });
    this.#rolloutSection = section("Rollouts", this.#rollouts.element);
    this.#rolloutSection.hidden = true;
    this.element = el(
      "div",
      {},
      el("h1", {}, "Models"),
      el("p", { class: "row" }, el("label", { for: "filter" }, "Filter by name, label or state"), this.#filter),
      this.#summary,
      this.#versions.element,
      this.#rolloutSection,
      this.#load,
    );
    live.addEventListener("models", this.#onModels);
    this.#schedule();
  }

  close() {
    this.#live.removeEventListener("models", this.#onModels);
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
    const all = [...this.#live.models];
    const wanted = this.#filter.value.trim().toLowerCase();
    const isFound = ([, row]) =>
      `${row.name} ${labelsOf(row, this.#rollout(row.name))} ${stateOf(row)}`.toLowerCase().includes(wanted);
    const found = wanted ? all.filter(isFound) : all;
    this.#versions.draw(found);
    setText(this.#summary, summarize(all.map(([, row]) => row), found.length, this.#live.rollouts));
    this.#drawRollouts(new Set(found.map(([, row]) => row.name)));
  }

  #drawRollouts(names) {
    const rows = new Map();
    for (const [name, rollout] of this.#live.rollouts) {
      const before = this.#rolloutRows.get(name);
      const version = (rollout.rollout ?? rollout.ended).candidate;
      rows.set(name, before?.of === rollout ? before : { ...rollout, of: rollout, name, version: String(version) });
    }
    this.#rolloutRows = rows;
    this.#rolloutSection.hidden = !rows.size;
    this.#rollouts.draw([...rows].filter(([name]) => names.has(name)));
  }
}

function summarize(all, shown, rollouts) {
  if (!all.length) return "No models.";
  const count = (state) => all.filter((row) => row.state === state).length;
  const sum = (name) => all.reduce((total, row) => total + row[name], 0);
  const parts = [`${all.length} versions`, `${count("READY")} ready`];
  if (count("NOT_IN_MEMORY")) parts.push(`${count("NOT_IN_MEMORY")} not in memory`);
  parts.push(`${count("FAILED")} failed`, `${number(sum("rate"))} requests/s`, `${bytes(sum("memory"))} of memory`);
  const running = [...rollouts.values()].filter(({ rollout }) => rollout).length;
  if (running) parts.push(`${running} ${running === 1 ? "rollout" : "rollouts"}`);
  return shown < all.length ? `${shown} of ${parts.join(", ")}` : parts.join(", ");
}
