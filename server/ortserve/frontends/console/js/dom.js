// Elements and their text. Text from the server or a caller becomes a text node, never markup.

/**
 * Create an element.
 *
 * Attributes whose names begin with "on" are listeners; true and false set and leave out an attribute.
 */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Create an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set the text of an element if it differs, so that unchanged text causes no layout and is not announced again. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A table of two columns for names and values. */
export function facts(entries) {
  return el("dl", { class: "facts" }, entries.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

/** A table with a header row. Cells are texts or nodes. */
export function table(caption, heads, rows) {
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el(
      "table",
      {},
      el("caption", { class: "hidden" }, caption),
      el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell) => el("td", {}, cell))))),
    ),
  );
}

/** A part of a view with a heading. */
export function section(title, ...children) {
  return el("section", {}, el("h2", {}, title), ...children);
}
