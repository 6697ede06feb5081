// Actions of operators: load, unload and reload a model, and the log level. Each asks once and says what came of it.

import { call, read } from "./api.js";
import { el, section, setText } from "./dom.js";

const LEVELS = ["debug", "info", "warning", "error"];

/** Ask a person. Resolves to whether the action may go on. */
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

/** A button for an action, which asks first, and reports to `status`. */
function actionButton(title, question, status, act) {
  const button = el("button", { type: "button" }, title);
  button.addEventListener("click", async () => {
    if (!(await confirmed(question(), title))) return;
    button.disabled = true;
    status.className = "soft";
    setText(status, `${title}: under way`);
    const began = performance.now();
    try {
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

/** The actions on one model. All of its versions change. */
export function modelActions(name) {
  const status = el("p", { role: "status" });
  const buttons = [
    actionButton("Reload", () => `Read the files of ${name} anew and load what has changed? The present load serves until then.`, status, () => load(name)),
    actionButton("Unload", () => `Unload all versions of ${name}? Its requests are answered first, later ones are rejected.`, status, () => unload(name)),
  ];
  return section("Actions", el("p", { class: "row" }, buttons), status);
}

/** A field to load any model of the repositories. */
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

/** The choice of the log level. */
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
