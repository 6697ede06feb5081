// A form for the inputs of a version, the answer with labels and bars, and the request as code.

import { call, keyOf } from "./api.js";
import { curlCommand, inferPath, pythonProgram } from "./code.js";
import { el, section, table } from "./dom.js";
import { milliseconds, number, shape as spell } from "./format.js";
import { imageInput, takesImages } from "./image_input.js";
import { countOf, defaultShape, parseAnswer, parseShape, parseValues, randomValue, requestText } from "./tensors.js";

const MOST_SHOWN = 256;
const MOST_TYPED = 1024;
const MOST_BARS = 10;
const MOST_ROWS = 4;

/** The address of the last body as a file. The browser keeps the body until the address is revoked. */
let bodyUrl = "";

/** The form that sends requests to one version. */
export class TryForm {
  #name;
  #version;
  #about;
  #fields;
  #result = el("div", { "aria-live": "polite" });
  #button = el("button", {}, "Run");
  #sequence = null;

  constructor(name, version, about) {
    this.#name = name;
    this.#version = version;
    this.#about = about;
    this.#fields = about.inputs.map((tensor) => new InputField(tensor));
    if (about.takes_sequences) this.#sequence = new SequenceFields();
    const form = el(
      "form",
      { "aria-label": "Try it" },
      this.#fields.map((field) => field.element),
      this.#sequence?.element,
      el("p", {}, this.#button),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#run();
    });
    this.element = section("Try it", form, this.#result);
  }

  async #run() {
    this.#button.disabled = true;
    try {
      const inputs = this.#fields.filter((field) => field.isSent).map((field) => field.read());
      const parameters = this.#sequence?.read() ?? {};
      const body = requestText(inputs, parameters);
      const path = inferPath(this.#name, this.#version);
      const parts = [this.#code(inputs, parameters, path, body)];
      try {
        parts.unshift(...(await this.#answer(path, body)));
      } catch (error) {
        parts.unshift(el("p", { class: "bad", role: "alert" }, error.message));
      }
      this.#result.replaceChildren(...parts);
    } catch (error) {
      this.#result.replaceChildren(el("p", { class: "bad", role: "alert" }, error.message));
    } finally {
      this.#button.disabled = false;
    }
  }

  async #answer(path, body) {
    const began = performance.now();
    const response = await call("infer", path, { method: "POST", body });
    const text = await response.text();
    const tookMs = performance.now() - began;
    const { outputs } = parseAnswer(text);
    const labels = new Map(this.#about.outputs.map((output) => [output.name, output.labels]));
    return [
      el("h3", {}, "Answer"),
      ...outputs.map((output) => drawOutput(output, labels.get(output.name) ?? [])),
      el("h3", {}, "Time of this request"),
      drawPhases(response.headers.get("server-timing") ?? "", tookMs),
    ];
  }

  #code(inputs, parameters, path, body) {
    const needsKey = Boolean(keyOf("infer"));
    const curl = curlCommand(location, path, body, needsKey);
    const { outputs } = this.#about;
    const python = pythonProgram(location, this.#name, this.#version, inputs, outputs, parameters, needsKey);
    URL.revokeObjectURL(bodyUrl);
    bodyUrl = URL.createObjectURL(new Blob([body]));
    const saved = el("a", { download: "request.json", href: bodyUrl }, "request.json");
    return el(
      "details",
      {},
      el("summary", {}, "This request as code"),
      el("p", {}, "The body of the request: ", saved),
      code("curl", curl),
      code("Python, with tritonclient[http]", python),
    );
  }
}

function code(title, text) {
  const copy = el("button", { type: "button", onclick: () => navigator.clipboard?.writeText(text) }, "Copy");
  const shown = el("pre", { tabindex: "0", role: "region", "aria-label": title }, text);
  return el("div", {}, el("h4", { class: "row" }, title, " ", copy), shown);
}

/** The fields of one input. */
class InputField {
  #tensor;
  #shape = el("input", { type: "text", spellcheck: "false", autocomplete: "off" });
  #values;
  #sent = el("input", { type: "checkbox", checked: true });
  #tokens = null; // values from an image, or random ones, in place of typed ones

  constructor(tensor) {
    this.#tensor = tensor;
    const dimensions = defaultShape(tensor);
    this.#shape.value = dimensions.join(",");
    this.#values = this.#makeValues(countOf(dimensions));
    const isBytes = tensor.datatype === "BYTES";
    const hint = isBytes ? "one text a line" : "a single value fills the tensor";
    this.element = el(
      "fieldset",
      {},
      el("legend", {}, `${tensor.name}: ${tensor.datatype} ${tensor.any_shape ? "of any shape" : spell(tensor.shape)}`),
      tensor.optional ? el("label", { class: "field" }, this.#sent, " Send this optional input") : null,
      el("label", { class: "field" }, "Shape ", this.#shape),
      takesImages(tensor) ? imageInput(tensor, () => this.#readShape(), (tokens) => this.#show(tokens)) : null,
      el("label", { class: "field" }, `Values (${hint}) `, this.#values),
      isBytes ? null : el("button", { type: "button", onclick: () => this.#fillRandomly() }, "Random values"),
    );
  }

  /** Whether the request contains the input. */
  get isSent() {
    return this.#sent.checked;
  }

  /** Return the input for a request. Throws Error for invalid values. */
  read() {
    const dimensions = this.#readShape();
    if (this.#tokens !== null && this.#tokens.length !== countOf(dimensions)) this.#tokens = null;
    const text = this.#values.type === "checkbox" ? String(this.#values.checked) : this.#values.value;
    const tokens = this.#tokens ?? parseValues(text, this.#tensor, dimensions);
    return { tensor: this.#tensor, shape: dimensions, tokens };
  }

  #readShape() {
    return parseShape(this.#shape.value, this.#tensor);
  }

  #makeValues(count) {
    const { datatype } = this.#tensor;
    if (count === 1 && datatype === "BOOL") return el("input", { type: "checkbox" });
    const forget = () => {
      this.#tokens = null;
    };
    const rows = Math.min(6, Math.max(1, Math.ceil(count / 16)));
    const values = el("textarea", { rows, spellcheck: "false", oninput: forget });
    const first = { BYTES: "hello", BOOL: "false" }[datatype] ?? "0";
    values.value = datatype === "BYTES" || count > MOST_TYPED ? first : Array(count).fill(first).join(" ");
    return values;
  }

  #show(tokens) {
    this.#tokens = tokens;
    this.#values.value = tokens.length > MOST_TYPED ? `${tokens.slice(0, 16).join(" ")} …` : tokens.join(" ");
  }

  #fillRandomly() {
    const { datatype } = this.#tensor;
    if (this.#values.type === "checkbox") {
      this.#values.checked = Math.random() < 0.5;
      return;
    }
    try {
      const tokens = Array.from({ length: countOf(this.#readShape()) }, () => randomValue(datatype));
      this.#show(tokens);
    } catch (error) {
      this.#values.value = error.message;
    }
  }
}

/** The fields for the sequence of a request. */
class SequenceFields {
  #id = el("input", { type: "number", min: "1", value: "1" });
  #start = el("input", { type: "checkbox", checked: true });
  #end = el("input", { type: "checkbox" });

  constructor() {
    this.element = el(
      "fieldset",
      {},
      el("legend", {}, "Sequence"),
      el("label", { class: "field" }, "Number ", this.#id),
      el("label", { class: "field" }, this.#start, " First request"),
      el("label", { class: "field" }, this.#end, " Last request"),
    );
  }

  read() {
    return {
      sequence_id: Number(this.#id.value),
      sequence_start: this.#start.checked,
      sequence_end: this.#end.checked,
    };
  }
}

/** Draw an output: the largest scores of the first rows as bars, and the values as text. */
function drawOutput({ name, datatype, shape, data }, labels) {
  const isScores = datatype.startsWith("FP") || datatype === "BF16";
  const width = countOf(shape.slice(1));
  const rows = shape.length > 1 && isScores && width > 1 && width <= 100_000 ? Math.min(shape[0], MOST_ROWS) : 0;
  const bars = Array.from({ length: rows }, (_, row) =>
    drawBars(rows > 1 ? `${name}, row ${row + 1}` : name, data.slice(row * width, (row + 1) * width).map(Number), labels),
  );
  const values = data.slice(0, MOST_SHOWN).map((value) => {
    const label = !isScores && shape.length <= 1 && typeof value === "number" ? labels[value] : undefined;
    return label === undefined ? String(value) : `${value} (${label})`;
  });
  const more = data.length > MOST_SHOWN ? ` … ${data.length - MOST_SHOWN} more` : "";
  return el(
    "div",
    { class: "output", "data-output": name },
    el("p", {}, el("strong", {}, name), ` ${datatype} ${spell(shape)}`),
    bars,
    el("pre", { tabindex: "0", role: "region", "aria-label": `Values of ${name}` }, values.join(" ") + more),
  );
}

/** Draw the largest values of a row as bars. NaN comes last; an infinite bar is as long as the longest. */
function drawBars(title, values, labels) {
  const isLess = (one, other) => one < other || (Number.isNaN(one) && !Number.isNaN(other));
  const order = values
    .map((_, index) => index)
    .sort((one, other) => isLess(values[one], values[other]) - isLess(values[other], values[one]));
  const shown = order.slice(0, MOST_BARS);
  const finite = shown.map((index) => Math.abs(values[index])).filter(Number.isFinite);
  const most = Math.max(...finite, Number.MIN_VALUE);
  const rows = shown.map((index) => {
    const bar = el("span", { class: "bar a1", "aria-hidden": "true" });
    bar.style.width = `${Math.min(100, (100 * Math.max(0, values[index] || 0)) / most)}%`;
    const label = labels[index] === undefined ? String(index) : `${index}: ${labels[index]}`;
    return [label, number(values[index]), el("span", { class: "track" }, bar)];
  });
  return table(`Largest values of ${title}`, ["Element", "Value", "Share of the largest"], rows);
}

function drawPhases(header, tookMs) {
  const phases = [...header.matchAll(/(\w+);dur=([\d.]+)/g)].map(([, name, ms]) => [name, Number(ms)]);
  const servedMs = phases.reduce((sum, [, ms]) => sum + ms, 0);
  const rows = [
    ...phases,
    ["server in all", servedMs],
    ["network and browser", Math.max(0, tookMs - servedMs)],
  ];
  const longest = Math.max(...rows.map(([, ms]) => ms), Number.MIN_VALUE);
  return table(
    "Phases",
    ["Phase", "Time", "Share of the longest"],
    rows.map(([name, ms]) => {
      const bar = el("span", { class: "bar a2", "aria-hidden": "true" });
      bar.style.width = `${(100 * ms) / longest}%`;
      return [name, milliseconds(ms) || "0 ms", el("span", { class: "track" }, bar)];
    }),
  );
}
