// The page: its views by the address, the state of the connection, and the dialog for keys.

import { setKeyDialog } from "./api.js";
import { setText } from "./dom.js";
import { showKeys } from "./keys.js";
import { Live } from "./live.js";
import { ModelView } from "./model_view.js";
import { ModelsView } from "./models_view.js";
import { ServerView } from "./server_view.js";

const live = new Live();
const main = document.getElementById("view");
let shown = null;

/** Decode a part of the address. A part that a user has typed may be malformed, and stays as it is. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** Show the view that the address names: #/models, #/models/<name>/<version> or #/server. */
function route() {
  const parts = location.hash.replace(/^#\/?/, "").split("/").map(decoded);
  const [view, name, version] = parts;
  const watched = view === "models" && name ? { model: name, version: version ?? "" } : null;
  shown?.close?.();
  if (watched) shown = new ModelView(live, watched.model, watched.version);
  else if (view === "server") shown = new ServerView(live);
  else shown = new ModelsView(live);
  main.replaceChildren(shown.element);
  document.title = `${shown.title} – ortserve`;
  for (const link of document.querySelectorAll("#nav a")) {
    const isCurrent = link.hash === (view === "server" ? "#/server" : "#/models");
    if (isCurrent) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  live.watch(watched);
}

live.addEventListener("connection", ({ detail }) => {
  const status = document.getElementById("connection");
  const state = detail.ok ? live.server.state : "not connected";
  status.className = state === "ready" ? "good" : "bad";
  setText(status, state);
  const notice = document.getElementById("notice");
  notice.hidden = detail.ok;
  setText(notice, detail.ok ? "" : `No live data: ${detail.why}. Trying again.`);
});

setKeyDialog((group, why) => showKeys(group, why));
document.getElementById("keys").addEventListener("click", async () => {
  if ((await showKeys("metadata", "")) !== null) live.restart();
});
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
addEventListener("hashchange", () => {
  route();
  main.focus();
});
route();
