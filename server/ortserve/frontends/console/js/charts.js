// Charts as SVG: lines and stacked areas over the last 15 minutes, bars, and a curve with observed points.

import { el, setText, svg } from "./dom.js";
import { number } from "./format.js";

const WIDTH = 560;
const HEIGHT = 170;
const LEFT = 52;
const BOTTOM = 22;
const TOP = 8;
const RIGHT = 8;
export const WINDOW_MS = 15 * 60 * 1000;

/** A figure with a title, a drawing and a legend that holds the latest values as text. */
class Chart {
  constructor(title, unit, names, isStacked = false) {
    this.drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
    this.values = names.map(() => el("span", { class: "value" }));
    const legend = names.map((name, index) =>
      el("li", {}, el("span", { class: `key k${index + 1}`, "aria-hidden": "true" }), `${name} `, this.values[index]),
    );
    this.element = el(
      "figure",
      { class: isStacked ? "stacked" : "lines" },
      el("figcaption", {}, unit ? `${title} (${unit})` : title),
      this.drawing,
      el("ul", { class: "legend" }, legend),
    );
  }

  /** The lines and texts of both axes. `x` has labels with their positions. */
  axes(most, x) {
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const y = yOf(share * most, most);
      parts.push(svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y, class: "grid" }));
      parts.push(svg("text", { x: LEFT - 6, y: y + 4, class: "right" }, number(share * most)));
    }
    for (const [position, label, anchor] of x) {
      parts.push(svg("text", { x: position, y: HEIGHT - 6, class: anchor }, label));
    }
    return parts;
  }
}

/** Lines, or stacked areas, over the time since the first point, up to 15 minutes. */
export class TimeChart extends Chart {
  #isStacked;

  constructor(title, unit, names, { isStacked = false } = {}) {
    super(title, unit, names, isStacked);
    this.#isStacked = isStacked;
  }

  /** Draw points, each with a time in milliseconds and a value for each name. */
  draw(points, nowMs) {
    const stacked = this.#isStacked;
    const tops = points.map(({ values }) => (stacked ? values.reduce((sum, value) => sum + value, 0) : Math.max(...values)));
    const most = roundUp(Math.max(0, ...tops));
    const oldestMs = points.length ? nowMs - points[0].ms : 0;
    const windowMs = Math.min(WINDOW_MS, Math.max(1, Math.ceil(oldestMs / 60_000)) * 60_000);
    const xOf = (ms) => LEFT + (WIDTH - LEFT - RIGHT) * (1 - (nowMs - ms) / windowMs);
    const shapes = [];
    let below = points.map(() => 0);
    this.values.forEach((text, index) => {
      const at = points.map(({ values }, point) => values[index] + below[point]);
      const upper = points.map(({ ms }, point) => `${xOf(ms).toFixed(1)},${yOf(at[point], most).toFixed(1)}`);
      if (stacked) {
        const base = below;
        const lower = points.map(({ ms }, point) => `${xOf(ms).toFixed(1)},${yOf(base[point], most).toFixed(1)}`);
        shapes.push(svg("polygon", { points: [...upper, ...lower.reverse()].join(" "), class: `a${index + 1}` }));
        below = at;
      } else {
        shapes.push(svg("polyline", { points: upper.join(" "), class: `l${index + 1}` }));
      }
      setText(text, points.length ? number(points.at(-1).values[index]) : "–");
    });
    const times = [
      [LEFT, `${windowMs / 60_000} min ago`, "left"],
      [WIDTH - RIGHT, "now", "right"],
    ];
    this.drawing.replaceChildren(...this.axes(most, times), ...shapes);
  }
}

/** A chart of at most 24 bars, with a label below each. */
export class BarChart extends Chart {
  constructor(title, unit) {
    super(title, unit, []);
  }

  /** Draw bars: labels and values. */
  draw(bars) {
    const shown = bars.slice(0, 24);
    const most = roundUp(Math.max(0, ...shown.map(([, value]) => value)));
    const step = (WIDTH - LEFT - RIGHT) / Math.max(shown.length, 4);
    const shapes = shown.map(([label, value], index) => {
      const y = yOf(value, most);
      const bar = { x: LEFT + index * step + step * 0.1, width: step * 0.8, y, height: HEIGHT - BOTTOM - y };
      return svg("rect", { ...bar, class: "a1" }, svg("title", {}, `${label}: ${number(value)}`));
    });
    const labels = shown.map(([label], index) => [LEFT + (index + 0.5) * step, label, "middle"]);
    const text = shown.map(([label, value]) => `${label}: ${number(value)}`).join(", ");
    this.drawing.setAttribute("aria-label", `${this.element.firstChild.textContent}. ${text}`);
    this.drawing.replaceChildren(...this.axes(most, labels), ...shapes);
  }
}

/** A curve over the rows of a batch, on a logarithmic axis, with observations as dots. */
export class CurveChart extends Chart {
  constructor(title, unit) {
    super(title, unit, ["predicted", "observed mean"]);
  }

  /** Draw a curve and dots: pairs of rows and values. */
  draw(curve, dots) {
    const all = [...curve, ...dots];
    const most = roundUp(Math.max(0, ...all.map(([, value]) => value)));
    const last = Math.log2(Math.max(2, ...all.map(([rows]) => rows)));
    const xOf = (rows) => LEFT + ((WIDTH - LEFT - RIGHT - 20) * Math.log2(Math.max(1, rows))) / last + 10;
    const points = curve.map(([rows, value]) => `${xOf(rows)},${yOf(value, most)}`).join(" ");
    const marks = dots.map(([rows, value]) =>
      svg("circle", { cx: xOf(rows), cy: yOf(value, most), r: 4, class: "d2" }, svg("title", {}, `${rows}: ${number(value)}`)),
    );
    const labels = [];
    for (let power = 0; power <= last; power += Math.max(1, Math.ceil(last / 8))) {
      labels.push([xOf(2 ** power), String(2 ** power), "middle"]);
    }
    const text = curve.map(([rows, value]) => `${rows} rows ${number(value)}`).join(", ");
    this.drawing.setAttribute("aria-label", `${this.element.firstChild.textContent}. ${text}`);
    this.drawing.replaceChildren(...this.axes(most, labels), svg("polyline", { points, class: "l1" }), ...marks);
  }
}

function yOf(value, most) {
  return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / most);
}

/** Round up to 1, 2 or 5 times a power of ten. */
function roundUp(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}
