// One version: its live charts, its errors, its inputs and outputs, and its configuration.

import { modelActions, versionActions } from "./actions.js";
import { read } from "./api.js";
import { BarChart, CurveChart, TimeChart, WINDOW_MS } from "./charts.js";
import { el, facts, section, setText, table } from "./dom.js";
import { bytes, duration, number, percent, shape } from "./format.js";
import { keyOfVersion } from "./live.js";
import { LiveTable } from "./live_table.js";
import { TryForm } from "./try_view.js";
import { addressOf, classOf, decisionOf, labelsOf, progressOf, stateOf, tailsOf } from "./versions.js";

const MEMORY = {
  sessions: "Sessions, with weights and the graph",
  runs: "Runs, mostly the arena",
  mapped: "Mapped files, not counted",
  expected: "Expected by its load",
};
const PHASES = ["decode", "queue", "stage", "compute", "encode"];

/** Return the path of the documents of a version. */
function pathOf(name, version) {
  const model = `/v2/console/models/${encodeURIComponent(name)}`;
  return version ? `${model}/versions/${encodeURIComponent(version)}` : model;
}

export class ModelView {
  #live;
  #name;
  #version;
  #points = [];
  #loaded = "";
  #state = el("p", { role: "status" });
  #labels = el("p", { class: "soft" });
  #numbers = el("div");
  #errors = el("div");
  #memory = el("div");
  #rollout = el("div");
  #shownRollout = null;
  #versions;
  #about = el("div");
  #try = el("div");
  #actions = el("div");
  #throughput = new TimeChart("Throughput", "per second", ["answered", "refused", "failed"]);
  #latency = new TimeChart("Latency", "ms", ["p50", "p90", "p99"]);
  #phases = new TimeChart("Mean latency by phase", "ms", PHASES, { isStacked: true });
  #sizes = new BarChart("Batches by number of rows since the load", "");
  #curve = new CurveChart("Time of a batch by its rows, L(n)", "ms");
  #listeners = [];

  constructor(live, name, version) {
    this.#live = live;
    this.#name = name;
    this.#version = version;
    this.title = version ? `${name}, version ${version}` : name;
    const rollout = () => live.rollouts.get(name);
    const columns = [
      { title: "Version", text: (row) => row.version || "unknown", value: (row) => Number(row.version) },
      { title: "Labels", text: (row) => labelsOf(row, rollout()), value: (row) => labelsOf(row, rollout()), className: "labels" },
      { title: "State", text: stateOf, value: stateOf, className: "state" },
    ];
    this.#versions = new LiveTable("Versions", columns, {
      addressOf: (row) => addressOf(row.name, row.version),
      classOf: (row) => `is-${classOf(row)}`,
      dependsOn: rollout,
      onSort: () => this.#drawState(),
    });
    this.element = el(
      "div",
      {},
      el("p", {}, el("a", { href: "#/models" }, "All models")),
      el("h1", {}, this.title),
      this.#state,
      this.#labels,
      section(
        "Live",
        el(
          "div",
          { class: "charts" },
          [this.#throughput, this.#latency, this.#phases, this.#sizes, this.#curve].map((chart) => chart.element),
        ),
      ),
      // Parts that may grow are below the form, so that it does not move while the user types or draws.
      this.#try,
      this.#actions,
      section("Versions and labels", this.#versions.element),
      this.#rollout,
      section("Batching", this.#numbers),
      section("Memory", this.#memory),
      section("Errors", this.#errors),
      this.#about,
    );
    this.#listen("history", (data) => this.#begin(data));
    this.#listen("model", (data) => this.#add(data));
    this.#listen("models", () => this.#drawState());
    this.#drawCharts();
    this.#drawState();
  }

  close() {
    for (const [name, listener] of this.#listeners) this.#live.removeEventListener(name, listener);
  }

  #listen(name, take) {
    const listener = ({ detail }) => take(detail);
    this.#listeners.push([name, listener]);
    this.#live.addEventListener(name, listener);
  }

  /** Show the state in the row of the version. After a load, read the other documents again. */
  #drawState() {
    const row = this.#live.models.get(keyOfVersion(this.#name, this.#version));
    const text = row ? stateOf(row) : this.#live.models.size ? "not known to the server" : "";
    setText(this.#state, text);
    this.#state.className = row ? classOf(row) : "bad";
    const labels = row ? labelsOf(row, this.#live.rollouts.get(this.#name)) : "";
    setText(this.#labels, labels && `Labels: ${labels}`);
    this.#labels.hidden = !labels;
    const known = [...this.#live.models].filter(([, { name }]) => name === this.#name);
    this.#versions.draw(known);
    this.#drawRollout();
    if (row && !this.#actions.firstChild) this.#drawActions();
    // `why` is included for failures only, because it changes each second during a load.
    const load = row ? `${row.state} ${row.load_s} ${row.state === "FAILED" ? row.why : ""}` : "";
    if (row && load !== this.#loaded) {
      this.#loaded = load;
      this.#readAbout();
    }
  }

  #drawActions() {
    const status = el("p", { role: "status" });
    const rollout = () => this.#live.rollouts.get(this.#name)?.rollout ?? null;
    this.#actions.append(
      section(
        "Actions",
        this.#live.server.loads_models ? modelActions(this.#name, status) : null,
        this.#version ? versionActions(this.#name, this.#version, rollout, status) : null,
        status,
      ),
    );
  }

  #drawRollout() {
    const known = this.#live.rollouts.get(this.#name);
    if (known === this.#shownRollout) return;
    this.#shownRollout = known;
    this.#rollout.replaceChildren(...(known ? [section("Rollout", facts(describeRollout(known)))] : []));
  }

  #drawMemory(memory) {
    const kinds = Object.entries(memory).map(([kind, size]) => [MEMORY[kind] ?? kind, bytes(size)]);
    const row = this.#live.models.get(keyOfVersion(this.#name, this.#version));
    const files = row?.file_bytes ? [["Files on disk", bytes(row.file_bytes)]] : [];
    const held = kinds.length ? kinds : [["In memory", "nothing of its own"]];
    this.#memory.replaceChildren(facts([...held, ...files]));
  }

  async #readAbout() {
    try {
      this.#drawAbout(await read("metadata", pathOf(this.#name, this.#version)));
    } catch (error) {
      this.#about.replaceChildren(el("p", { class: "bad" }, error.message));
    }
  }

  #begin({ interval_s: interval, columns, rows }) {
    const now = Date.now();
    this.#points = rows.map((row, index) => ({
      ms: now - (rows.length - index) * interval * 1000,
      rates: Object.fromEntries(columns.map((column, place) => [column, row[place]])),
    }));
    this.#drawCharts();
  }

  #add(data) {
    if (data.name !== this.#name || data.version !== this.#version) return;
    this.#points.push({ ms: Date.now(), rates: data.rates });
    this.#drawCharts();
    this.#drawBatches(data);
    this.#drawErrors(data);
    this.#drawMemory(data.memory);
  }

  #drawCharts() {
    const now = Date.now();
    this.#points = this.#points.filter(({ ms }) => now - ms < WINDOW_MS);
    const draw = (chart, names) =>
      chart.draw(this.#points.map(({ ms, rates }) => ({ ms, values: names.map((name) => rates[name]) })), now);
    draw(this.#throughput, ["requests_per_s", "refused_per_s", "failed_per_s"]);
    draw(this.#latency, ["p50_ms", "p90_ms", "p99_ms"]);
    draw(this.#phases, PHASES.map((phase) => `${phase}_ms`));
  }

  #drawBatches({ sizes, learned, rates, cache, sequences }) {
    this.#sizes.draw(sizes.map(([rows, count]) => [String(rows), count]));
    const latest = learned?.classes[0];
    const curve = Object.entries(latest?.latency_ms ?? {}).map(([rows, ms]) => [Number(rows), ms]);
    this.#curve.draw(curve, sizes.map(([rows, , ms]) => [rows, ms]));
    const numbers = [["Queued rows", number(rates.queue_rows)]];
    if (learned) {
      const saturation = learned.saturation === null ? "unknown" : `${number(100 * learned.saturation)} %`;
      numbers.push(
        ["Saturation", saturation],
        ["Arriving rows per second", number(learned.arrival_rows_per_s)],
        ["Most rows of a batch", String(learned.max_rows)],
      );
      if (latest) {
        numbers.push(["Observed batches behind L(n)", String(latest.observations)]);
        if (latest.shape) numbers.push(["Shape of L(n)", `${latest.shape}, the last used of ${learned.classes.length}`]);
      }
      const decisions = Object.entries(learned.decisions).filter(([, count]) => count);
      numbers.push(["Decisions", decisions.map(([name, count]) => `${name} ${number(count)}`).join(", ") || "none"]);
    }
    if (cache) numbers.push(["Response cache", `${number(cache.hits)} hits, ${number(cache.misses)} misses`]);
    if (sequences) numbers.push(["Sequences", `${sequences.active} active, ${sequences.waiting} waiting`]);
    this.#numbers.replaceChildren(facts(numbers));
  }

  #drawErrors({ errors, recent_errors: recent }) {
    const since = (kind) => errors[kind] ?? 0; // a reload begins to count at 0
    const kinds = Object.keys({ ...recent, ...errors }).sort((one, other) => since(other) - since(one));
    const rows = kinds.map((kind) => [kind, number(recent[kind] ?? 0), number(since(kind))]);
    this.#errors.replaceChildren(
      rows.length ? table("Errors by kind", ["Kind", "Last 15 minutes", "Since the load"], rows) : el("p", {}, "None."),
    );
  }

  #drawAbout(about) {
    this.#try.replaceChildren(...(about.inputs ? [new TryForm(this.#name, this.#version, about).element] : []));
    const row = this.#live.models.get(keyOfVersion(this.#name, this.#version));
    const parts = [];
    if (about.inputs) {
      const tensors = [
        ...about.inputs.map((tensor) => describe("input", tensor)),
        ...about.outputs.map((tensor) => describe("output", tensor)),
      ];
      const heads = ["Role", "Name", "Datatype", "Shape", "Notes"];
      parts.push(section("Inputs and outputs", table("Inputs and outputs", heads, tensors)));
      const load = row?.load_s ? [["load time", duration(row.load_s) === "0 s" ? `${row.load_s} s` : duration(row.load_s)]] : [];
      parts.push(section("How it runs", facts([...load, ...Object.entries(about.properties)])));
    }
    const settings = about.settings.map(({ name, value, origin }) => [name, value, origin]);
    settings.sort(([, , one], [, , other]) => (one === "default") - (other === "default"));
    parts.push(section("Configuration", table("Configuration", ["Option", "Value", "Set by"], settings)));
    this.#about.replaceChildren(...parts);
  }
}

function describeRollout(known) {
  const { rollout, figures, worst_errors: worst } = known;
  const facts = [["State", progressOf(known)]];
  if (rollout) {
    const isShadow = rollout.mode === "shadow";
    const rules = Object.entries(rollout.rules).filter(([, bound]) => bound !== null);
    facts.push(
      ["Mode", rollout.mode],
      ["Candidate", `version ${rollout.candidate}`],
      ["Share", `${percent(rollout.share)}${rollout.sticky ? `, sticky by ${rollout.sticky}` : ""}`],
      ["Requests", `${number(figures.requests)}, of which ${number(figures.failed)} failed`],
      isShadow
        ? ["Compared", `${number(figures.compared)}, of which ${number(figures.disagreed)} disagreed; ${number(figures.shed)} requests shed`]
        : ["Rejected", number(figures.rejected)],
      ["p99", tailsOf(figures) || "too few requests"],
    );
    const errors = Object.entries(worst).map(([measure, error]) => `${measure} ${error === null ? "infinite" : number(error)}`);
    if (errors.length) facts.push(["Worst errors", errors.join(", ")]);
    facts.push(["Rules", rules.map(([rule, bound]) => `${rule} ${bound}`).join(", ")]);
  }
  const decision = decisionOf(known);
  if (decision) facts.push(["Last decision", decision]);
  return facts;
}

function describe(role, tensor) {
  const notes = [];
  if (tensor.dims.some(Boolean)) notes.push(`dimensions ${tensor.dims.map((name) => name || "·").join(", ")}`);
  if (tensor.optional) notes.push("optional");
  if (tensor.batch_axis) notes.push(`rows on axis ${tensor.batch_axis}`);
  if (tensor.labels?.length) notes.push(`labels ${tensor.labels.slice(0, 3).join(", ")}${tensor.labels.length > 3 ? ", …" : ""}`);
  return [role, tensor.name, tensor.datatype, tensor.any_shape ? "any" : shape(tensor.shape), notes.join("; ")];
}
