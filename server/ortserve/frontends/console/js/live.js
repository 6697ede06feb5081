// The live state of all versions, from the event stream of the server. Reconnects when the stream ends.

import { CallError, follow } from "./api.js";

const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 10_000;

/** The key of a version in `Live.models`. */
export function keyOfVersion(name, version) {
  return JSON.stringify([name, version]);
}

/** Follows the stream and notifies listeners. The page has one object. */
export class Live extends EventTarget {
  /** Rows of the versions by `keyOfVersion`. */
  models = new Map();
  /** Rollouts by the name of their model, as `GET /v2/models/{model}/rollout` describes them. */
  rollouts = new Map();
  /** The latest state of the server. */
  server = {};
  #watched = null;
  #stop = null;

  /** Follow the stream from now on. If `watched` has a model and a version, the stream includes details of that version. */
  watch(watched) {
    const same = JSON.stringify(watched) === JSON.stringify(this.#watched);
    if (same && this.#stop !== null) return;
    this.#watched = watched;
    this.#stop?.abort();
    this.#stop = new AbortController();
    this.#run(this.#stop.signal);
  }

  /** Reconnect at once. */
  restart() {
    this.#stop?.abort();
    this.#stop = null;
    this.watch(this.#watched);
  }

  async #run(signal) {
    let retryMs = FIRST_RETRY_MS;
    const query = this.#watched ? `?${new URLSearchParams(this.#watched)}` : "";
    while (!signal.aborted) {
      let why = "the server closed the connection";
      try {
        await follow(`/v2/console/stream${query}`, signal, (name, data) => {
          if (signal.aborted) return;
          retryMs = FIRST_RETRY_MS;
          if (name === "end") why = data.reason;
          else this.#take(name, data);
        });
      } catch (error) {
        if (signal.aborted) return;
        why = error instanceof CallError ? error.message : "the server cannot be reached";
      }
      if (signal.aborted) return;
      this.#tell("connection", { ok: false, why });
      await new Promise((resolve) => setTimeout(resolve, retryMs));
      retryMs = Math.min(2 * retryMs, LAST_RETRY_MS);
    }
  }

  #take(name, data) {
    if (name === "models") {
      if (data.whole) for (const known of [this.models, this.rollouts]) known.clear();
      for (const key of data.gone) this.models.delete(keyOfVersion(...key));
      for (const row of data.models) this.models.set(keyOfVersion(row.name, row.version), row);
      for (const [name, rollout] of Object.entries(data.rollouts)) {
        if (rollout) this.rollouts.set(name, rollout);
        else this.rollouts.delete(name);
      }
      this.server = data.server;
      this.#tell("connection", { ok: true, why: "" });
    }
    this.#tell(name, data);
  }

  #tell(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}
