// Texts for the states, labels and rollouts of versions. Pure.

import { number, percent } from "./format.js";

/** Return the address of the view of a version. */
export function addressOf(name, version) {
  return `#/models/${encodeURIComponent(name)}/${encodeURIComponent(version)}`;
}

/** Describe the state of a version, with the progress of its load or the reason of a failure. */
export function stateOf({ state, why, reload }) {
  if (state === "NOT_IN_MEMORY") return why;
  const parts = [state.toLowerCase()];
  if (state === "READY" && reload) parts.push(`; reloading: ${reload}`);
  if (why) parts.push(state === "READY" ? `; latest problem: ${why}` : `: ${why}`);
  return parts.join("");
}

/** Return the CSS class that colors the state of a version. */
export function classOf({ state, why, reload }) {
  if (state === "READY") return why || reload ? "warn" : "good";
  if (state === "FAILED") return "bad";
  return state === "NOT_IN_MEMORY" || state === "GONE" ? "soft" : "warn";
}

/** Return the labels of a version, and its part in the rollout of the model. */
export function labelsOf(row, rollout) {
  const options = rollout?.rollout;
  const trial = options && String(options.candidate) === row.version ? [trialOf(rollout)] : [];
  return [...row.labels, ...trial].join(", ");
}

/** Describe the rollout of a candidate in a few words. */
function trialOf({ rollout, problem }) {
  return problem ? "candidate without requests" : `candidate: ${rollout.mode} ${percent(rollout.share)}`;
}

/** Describe the end of the last rollout of a model, with the reason; empty if no rollout has ended. */
export function decisionOf({ ended }) {
  return ended ? `version ${ended.candidate} ${ended.result.replace("_", " ")}: ${ended.reason}` : "";
}

/** Describe whether a rollout runs, or the reason why it has no effect. */
export function progressOf({ rollout, problem }) {
  if (!rollout) return "ended";
  return problem ? `no effect: ${problem}` : "running";
}

/** Compare the 99th percentile of latency of the candidate with the one of stable. */
export function tailsOf({ candidate_p99_s: candidate, stable_p99_s: stable }) {
  if (candidate === null || stable === null) return "";
  return `${number(1000 * candidate)} ms, stable ${number(1000 * stable)} ms`;
}
