// Calls to the server of this page. Only the memory of this module holds keys, so closing the page discards them.

const keys = new Map();
let askForKey = async () => null;

/** A call that the server answered with an error. */
export class CallError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Set the function that asks the user for a key of a group. It resolves to the key, or to null without one. */
export function setKeyDialog(ask) {
  askForKey = ask;
}

/** Return the stored key of a group; empty without one. */
export function keyOf(group) {
  return keys.get(group) ?? "";
}

/** Store the key of a group; an empty key removes it. */
export function setKey(group, key) {
  if (key) keys.set(group, key);
  else keys.delete(group);
}

/**
 * Call the server. If it rejects the key of the group, try the keys of the other groups, then ask the user.
 *
 * Returns the response. Throws CallError for an error response, and TypeError if the server cannot be reached.
 */
export async function call(group, path, options = {}) {
  const tried = new Set();
  let key = keyOf(group);
  for (;;) {
    tried.add(key);
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    // Relative to the page, which a proxy may serve below a path of its own.
    const response = await fetch(`.${path}`, { ...options, headers, cache: "no-store", credentials: "omit" });
    if (response.ok) {
      if (key) keys.set(group, key);
      return response;
    }
    const error = new CallError(response.status, await errorOf(response));
    if (response.status !== 401 && response.status !== 403) throw error;
    const other = [...keys.values()].find((known) => !tried.has(known));
    const next = other ?? (await askForKey(group, tried.size > 1 ? error.message : ""));
    if (next === null) throw error;
    key = next;
  }
}

/** Call the server and return the JSON document of the response. */
export async function read(group, path, options) {
  return (await call(group, path, options)).json();
}

async function errorOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error ?? text;
  } catch {
    return text || `status ${response.status}`;
  }
}

/**
 * Follow a stream of server-sent events until it ends. EventSource cannot send a key, so this function reads the events.
 *
 * `onEvent` receives the name and the document of each event.
 */
export async function follow(path, signal, onEvent) {
  const response = await call("metadata", path, { signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    for (const event of events) {
      const [first, second] = event.split("\n");
      onEvent(first.slice("event: ".length), JSON.parse(second.slice("data: ".length)));
    }
  }
}
