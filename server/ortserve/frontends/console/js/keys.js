// The dialog that asks for keys.

import { keyOf, setKey } from "./api.js";
import { el } from "./dom.js";

const GROUPS = {
  metadata: "see models and the server",
  infer: "try models",
  control: "load, unload and change settings",
};
let open = null;

/**
 * Ask for the key of a group. Resolves to the key, or to null if the dialog was cancelled.
 *
 * Concurrent calls share one dialog, because several requests may need the same key.
 */
export function showKeys(group, why) {
  open ??= ask(group, why).finally(() => {
    open = null;
  });
  return open;
}

function ask(group, why) {
  return new Promise((resolve) => {
    const fields = Object.entries(GROUPS).map(([name, use]) => {
      const input = el("input", { type: "password", name, autocomplete: "off", value: keyOf(name), spellcheck: "false" });
      return [name, input, el("label", {}, `Key of the group ${name}, to ${use}`, input)];
    });
    const dialog = el(
      "dialog",
      { "aria-labelledby": "keys-title" },
      el(
        "form",
        { method: "dialog" },
        el("h2", { id: "keys-title" }, "Keys"),
        el("p", {}, `Calls of the group ${group} may need a key. This page keeps keys in memory until it is closed.`),
        why ? el("p", { class: "bad", role: "alert" }, why) : null,
        fields.map(([, , label]) => label),
        el("p", { class: "row" }, el("button", { value: "use" }, "Use"), el("button", { value: "" }, "Cancel")),
      ),
    );
    dialog.addEventListener("close", () => {
      const isUsed = dialog.returnValue === "use";
      if (isUsed) for (const [name, input] of fields) setKey(name, input.value.trim());
      dialog.remove();
      resolve(isUsed ? keyOf(group) || null : null);
    });
    document.body.append(dialog);
    dialog.showModal();
    fields.find(([name]) => name === group)?.[1].focus();
  });
}
