// The server: versions, ports, keys, TLS, processors, memory, GPUs, connections, and options that were changed.

import { logLevel } from "./actions.js";
import { read } from "./api.js";
import { el, facts, section, table } from "./dom.js";
import { bytes, duration, number, percent } from "./format.js";

export class ServerView {
  title = "Server";
  #live;
  #now = el("div");
  #about = el("div");
  #onModels = () => this.#drawNow();

  constructor(live) {
    this.#live = live;
    this.element = el("div", {}, el("h1", {}, "Server"), section("Now", this.#now), this.#about, logLevel());
    live.addEventListener("models", this.#onModels);
    this.#drawNow();
    this.#readAbout();
  }

  close() {
    this.#live.removeEventListener("models", this.#onModels);
  }

  #drawNow() {
    const now = this.#live.server;
    if (now.state === undefined) return;
    const memory = now.models_memory;
    const budget = memory.budget_bytes;
    const held = bytes(memory.held_bytes);
    const connections = Object.entries(now.connections).map(([protocol, count]) => `${count} ${protocol}`);
    this.#now.replaceChildren(
      facts([
        ["State", now.state],
        ["Running for", duration(now.uptime_s)],
        ["Processors in use", number(now.processors)],
        ["Memory", bytes(now.memory_bytes)],
        ["Memory of models", budget ? `${held} of ${bytes(budget)}, ${percent(memory.held_bytes / budget)} of the budget` : `${held}, no budget`],
        ["Evictions", number(memory.evictions)],
        ["Loads without room", number(memory.refused_loads)],
        ["Python threads", String(now.threads)],
        ["Connections", connections.join(", ")],
        ["Viewers of this page", String(now.viewers)],
        ["Stalls of the event loop", now.stalls ? `${now.stalls}, ${duration(now.stalled_s)} in all` : "none"],
      ]),
    );
  }

  async #readAbout() {
    try {
      this.#drawAbout(await read("metadata", "/v2/console/server"));
    } catch (error) {
      this.#about.replaceChildren(el("p", { class: "bad" }, error.message));
    }
  }

  #drawAbout(about) {
    const keys = Object.entries(about.keys).map(([group, isNeeded]) => `${group}: ${isNeeded ? "needs a key" : "open"}`);
    const ports = Object.entries(about.ports).map(([protocol, port]) => `${protocol} ${port}`);
    const devices = about.devices.map((device) => [
      device.name,
      device.memory.total ? `${bytes(device.memory.total - device.memory.free)} of ${bytes(device.memory.total)}` : "unknown",
      device.utilization === null ? "unknown" : `${number(100 * device.utilization)} %`,
      Object.entries(device.ledger)
        .map(([owner, purposes]) => `${owner}: ${bytes(Object.values(purposes).reduce((sum, size) => sum + size, 0))}`)
        .join(", "),
    ]);
    const settings = about.settings.map(({ name, value, origin }) => [name, value, origin]);
    this.#about.replaceChildren(
      section("Versions", facts(Object.entries(about.versions))),
      section(
        "Access",
        facts([
          ["Name", about.name],
          ["Address", about.host],
          ["Ports", ports.join(", ")],
          ["Keys", keys.join(", ")],
          ["TLS", about.tls],
          ["Models are loaded", about.model_control_mode === "explicit" ? "by clients" : about.model_control_mode],
        ]),
      ),
      section(
        "Machine",
        facts([
          ["Processors to use", String(about.processors)],
          ["Memory to use", bytes(about.memory_limit_bytes)],
          ["Process", String(about.process)],
        ]),
      ),
      section(
        "GPUs in use",
        devices.length ? table("GPUs", ["GPU", "Memory", "Busy", "Memory by model"], devices) : el("p", {}, "None."),
      ),
      section("Options that differ from their defaults", table("Options", ["Option", "Value", "Set by"], settings)),
    );
  }
}
