// Actions of operators: loads, labels, rollouts and the log level. Each asks for confirmation and reports its result.

import { call, read } from "./api.js";
import { el, section, setText } from "./dom.js";

const LEVELS = ["debug", "info", "warning", "error"];

/** Ask the user to confirm an action. Resolves to true if the user confirms it. */
function confirmed(question, action) {
  return new Promise((resolve) => {
    const dialog = el(
      "dialog",
      { "aria-labelledby": "question" },
      el(
        "form",
        { method: "dialog" },
        el("p", { id: "question" }, question),
        el("p", { class: "row" }, el("button", { value: "yes" }, action), el("button", { value: "" }, "Cancel")),
      ),
    );
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Create a button that asks `question()` (a text or its promise), runs `act`, and reports to `status`. */
function actionButton(title, question, status, act) {
  const button = el("button", { type: "button" }, title);
  button.addEventListener("click", async () => {
    let began = 0;
    try {
      if (!(await confirmed(await question(), title))) return;
      button.disabled = true;
      status.className = "soft";
      setText(status, `${title}: under way`);
      began = performance.now();
      const result = await act();
      status.className = "good";
      setText(status, result ?? `${title}: done in ${((performance.now() - began) / 1000).toFixed(1)} s`);
    } catch (error) {
      status.className = "bad";
      setText(status, `${title}: ${error.message}`);
    } finally {
      button.disabled = false;
    }
  });
  return button;
}

function change(name, action) {
  return call("control", `/v2/repository/models/${encodeURIComponent(name)}/${action}`, { method: "POST" });
}

async function load(name) {
  await change(name, "load");
}

async function unload(name) {
  await change(name, "unload");
}

/** Create the buttons that reload and unload one model, with all its versions. */
export function modelActions(name, status) {
  const buttons = [
    actionButton("Reload", () => `Read the files of ${name} anew and load what has changed? The present load serves until then.`, status, () => load(name)),
    actionButton("Unload", () => `Unload all versions of ${name}? Its requests are answered first, later ones are rejected.`, status, () => unload(name)),
  ];
  return el("p", { class: "row" }, buttons);
}

/** Create the actions on labels and rollouts with one version. `rolloutOf()` returns the options of the rollout or null. */
export function versionActions(name, version, rolloutOf, status) {
  const path = (last) => `/v2/models/${encodeURIComponent(name)}/${last}`;
  const post = async (last, document) => stableOf(await read("control", path(last), { method: "POST", body: JSON.stringify(document) }));
  const rollBack = async () => {
    const rollout = rolloutOf();
    if (rollout) return `End the rollout of version ${rollout.candidate} of ${name}? All requests go to the version that is stable now.`;
    const { previous } = await read("metadata", path("labels"));
    return `Make ${previous ? `version ${previous}` : "the version before the last promotion"} of ${name} stable again?`;
  };
  const mode = el("select", { id: "rollout-mode" }, ["shadow", "canary"].map((one) => el("option", { value: one }, one)));
  const share = el("input", { id: "rollout-share", type: "number", min: "0", max: "100", step: "any", value: "10" });
  const inWords = () => `${mode.value} with ${share.value} % of the requests for stable`;
  const start = async () => {
    const before = rolloutOf();
    const kept = String(before?.candidate) === version ? before : {};
    const document = { ...kept, candidate: Number(version), mode: mode.value, share: share.valueAsNumber / 100 };
    await call("control", path("rollout"), { method: "PUT", body: JSON.stringify(document) });
    return `Version ${version} is the candidate: ${inWords()}.`;
  };
  const end = async () => {
    const { ended } = await read("control", path("rollout"), { method: "DELETE" });
    return `The rollout of version ${ended.candidate} has ended.`;
  };
  return [
    el(
      "p",
      { class: "row" },
      actionButton("Promote", () => `Make version ${version} of ${name} stable? It then answers requests without a version.`, status, () => post("promote", { version: Number(version) })),
      actionButton("Roll back", rollBack, status, () => post("rollback", {})),
    ),
    el(
      "p",
      { class: "row" },
      el("label", { for: "rollout-mode" }, "Rollout of this version"),
      mode,
      el("label", { for: "rollout-share" }, "Share in %"),
      share,
      actionButton("Start the rollout", () => `Try version ${version} of ${name} as ${inWords()}? Its figures begin anew.`, status, start),
      actionButton("End the rollout", () => `End the rollout of ${name} and leave the labels as they are?`, status, end),
    ),
  ];
}

function stableOf({ labels }) {
  const stable = labels.find((label) => label.name === "stable");
  return stable ? `Stable is version ${stable.version}.` : "No version is labelled stable.";
}

/** Create the form that loads any model of the repositories. */
export function loadForm() {
  const status = el("p", { role: "status" });
  const names = el("datalist", { id: "repository-models" });
  const input = el("input", { type: "text", id: "load-name", list: "repository-models", autocomplete: "off", spellcheck: "false" });
  input.addEventListener("focus", async () => {
    try {
      const entries = await read("metadata", "/v2/repository/index", { method: "POST" });
      const known = [...new Set(entries.map((entry) => entry.name))];
      names.replaceChildren(...known.map((name) => el("option", { value: name })));
    } catch (error) {
      setText(status, error.message);
    }
  });
  const act = () => {
    const name = input.value.trim();
    if (!name) throw new Error("expected the name of a model, got none");
    return load(name);
  };
  const button = actionButton("Load", () => `Load ${input.value.trim() || "the model"}?`, status, async () => act());
  return el("div", {}, el("p", { class: "row" }, el("label", { for: "load-name" }, "Load a model"), input, names, button), status);
}

/** Create the field that selects the log level. */
export function logLevel() {
  const status = el("p", { role: "status" });
  const choice = el("select", { id: "log-level" }, LEVELS.map((level) => el("option", { value: level }, level)));
  choice.value = "info";
  const set = async () => {
    const least = LEVELS.indexOf(choice.value);
    const body = JSON.stringify({
      log_verbose_level: least === 0 ? 1 : 0,
      log_info: least <= 1,
      log_warning: least <= 2,
      log_error: true,
    });
    return `The log level is ${levelOf(await read("control", "/v2/logging", { method: "POST", body }))}.`;
  };
  const button = actionButton("Change", () => `Log ${choice.value} and more severe lines from now on?`, status, set);
  return section(
    "Log level",
    el("p", { class: "row" }, el("label", { for: "log-level" }, "Lowest severity that is logged"), choice, button),
    status,
  );
}

function levelOf(settings) {
  if (settings.log_verbose_level > 0) return "debug";
  return ["info", "warning", "error"].find((level) => settings[`log_${level}`]) ?? "off";
}
