// Versions in words: their states, labels and rollouts. Pure.

import { number, percent } from "./format.js";

/** The address of the view of a version. */
export function addressOf(name, version) {
  return `#/models/${encodeURIComponent(name)}/${encodeURIComponent(version)}`;
}

/** The state of a version in words, with what its load is doing or why it failed. */
export function stateOf({ state, why, reload }) {
  if (state === "NOT_IN_MEMORY") return why;
  const parts = [state.toLowerCase()];
  if (state === "READY" && reload) parts.push(`; reloading: ${reload}`);
  if (why) parts.push(state === "READY" ? `; latest problem: ${why}` : `: ${why}`);
  return parts.join("");
}

/** The class that colors the state of a version. */
export function classOf({ state, why, reload }) {
  if (state === "READY") return why || reload ? "warn" : "good";
  if (state === "FAILED") return "bad";
  return state === "NOT_IN_MEMORY" || state === "GONE" ? "soft" : "warn";
}

/** The labels of a version, and its part in the rollout of its model. */
export function labelsOf(row, rollout) {
  const options = rollout?.rollout;
  const trial = options && String(options.candidate) === row.version ? [trialOf(rollout)] : [];
  return [...row.labels, ...trial].join(", ");
}

/** The rollout of a candidate, short. */
function trialOf({ rollout, problem }) {
  return problem ? "candidate without requests" : `candidate: ${rollout.mode} ${percent(rollout.share)}`;
}

/** How the last rollout of a model ended, with the reason; empty if none has. */
export function decisionOf({ ended }) {
  return ended ? `version ${ended.candidate} ${ended.result.replace("_", " ")}: ${ended.reason}` : "";
}

/** Whether a rollout runs, or why it does not. */
export function progressOf({ rollout, problem }) {
  if (!rollout) return "ended";
  return problem ? `no effect: ${problem}` : "running";
}

/** A time of a candidate beside that of stable. */
export function tailsOf({ candidate_p99_s: candidate, stable_p99_s: stable }) {
  if (candidate === null || stable === null) return "";
  return `${number(1000 * candidate)} ms, stable ${number(1000 * stable)} ms`;
}
