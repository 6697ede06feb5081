// Calls to the server this page came from. Keys are kept in this module's memory: closing the page forgets them.

const keys = new Map();
let askForKey = async () => null;

/** A call that the server answered with an error. */
export class CallError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Set what asks a person for a key of a group. It resolves to the key, or to null if there is none. */
export function setKeyDialog(ask) {
  askForKey = ask;
}

/** The key of a group that was given before. */
export function keyOf(group) {
  return keys.get(group) ?? "";
}

/** Keep a key for a group; an empty one is forgotten. */
export function setKey(group, key) {
  if (key) keys.set(group, key);
  else keys.delete(group);
}

/**
 * Call the server. If the call needs a key, the keys of the other groups are tried first, then a person is asked.
 *
 * Returns the response. Throws CallError for one that is no success, and TypeError if the server cannot be reached.
 */
export async function call(group, path, options = {}) {
  const tried = new Set();
  let key = keyOf(group);
  for (;;) {
    tried.add(key);
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
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

/** The document of a call. */
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
 * Follow a stream of server-sent events until it ends. EventSource cannot send a key, so the events are read here.
 *
 * `onEvent` gets the name and the document of each event.
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
