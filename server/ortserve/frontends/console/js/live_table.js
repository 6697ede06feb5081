// A table whose rows change while the user reads it. Any column sorts it, and changes happen in place.

import { el, setText } from "./dom.js";

/**
 * A table of rows with links in their first column.
 *
 * Each column has a title, `text(row)` for its cells, `value(row)` for sorting, and optionally `isNumber` or `className`.
 * `addressOf(row)` returns the target of the link of a row, and `classOf(row)` the class of its element. A row is drawn
 * again if the row or the result of `dependsOn(row)` is another object than before.
 */
export class LiveTable {
  #columns;
  #addressOf;
  #classOf;
  #dependsOn;
  #rows = new Map();
  #sortBy = 0;
  #isDescending = false;
  #body = el("tbody");
  #heads;

  constructor(caption, columns, { addressOf, classOf = () => "", dependsOn = () => null, onSort }) {
    this.#columns = columns;
    this.#addressOf = addressOf;
    this.#classOf = classOf;
    this.#dependsOn = dependsOn;
    this.#heads = columns.map((column, index) => {
      const sort = () => {
        this.#isDescending = this.#sortBy === index ? !this.#isDescending : Boolean(column.isNumber);
        this.#sortBy = index;
        onSort();
      };
      return el("th", { scope: "col", class: classesOf(column) }, el("button", { type: "button", onclick: sort }, column.title));
    });
    this.element = el(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
      el("table", { class: "live" }, el("thead", {}, el("tr", {}, this.#heads)), this.#body),
    );
  }

  /** Show `entries`, pairs of a key and a row, in the selected order. */
  draw(entries) {
    const found = [...entries].sort(([, one], [, other]) => this.#compare(one, other));
    const drawn = new Map();
    for (const [key, row] of found) drawn.set(key, this.#drawRow(row, this.#rows.get(key)));
    this.#rows = drawn;
    this.#place([...drawn.values()].map(({ element }) => element));
    this.#heads.forEach((head, index) => {
      if (index === this.#sortBy) head.setAttribute("aria-sort", this.#isDescending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
  }

  #compare(one, other) {
    const { value } = this.#columns[this.#sortBy];
    const [a, b] = this.#isDescending ? [value(other), value(one)] : [value(one), value(other)];
    if (a !== b) return a < b ? -1 : 1;
    const [first, second] = [this.#columns[0].value(one), this.#columns[0].value(other)];
    return first < second ? -1 : first > second ? 1 : Number(one.version) - Number(other.version);
  }

  #drawRow(row, before) {
    const other = this.#dependsOn(row);
    if (before?.row === row && before.other === other) return before;
    const drawn = before ?? this.#makeRow();
    Object.assign(drawn, { row, other });
    this.#columns.forEach((column, index) => setText(drawn.cells[index], column.text(row)));
    const address = this.#addressOf(row);
    if (drawn.cells[0].getAttribute("href") !== address) drawn.cells[0].setAttribute("href", address);
    drawn.element.className = this.#classOf(row);
    return drawn;
  }

  #makeRow() {
    const link = el("a");
    const cells = this.#columns.map((column, index) => (index ? el("td", { class: classesOf(column) }) : link));
    return { row: null, other: null, cells, element: el("tr", {}, el("th", { scope: "row" }, link), cells.slice(1)) };
  }

  /** Put the rows into the order of `elements`, and touch only rows that move. */
  #place(elements) {
    let next = this.#body.firstChild;
    for (const element of elements) {
      if (element === next) next = next.nextSibling;
      else this.#body.insertBefore(element, next);
    }
    while (next) {
      const following = next.nextSibling;
      next.remove();
      next = following;
    }
  }
}

function classesOf({ isNumber, className }) {
  return [isNumber ? "number" : "", className ?? ""].filter(Boolean).join(" ");
}
