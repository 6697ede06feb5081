// Tensors of a request as texts: typed values become tokens of JSON, so that INT64 values lose no digits.

const INTEGERS = {
  UINT8: [0n, 255n],
  UINT16: [0n, 65535n],
  UINT32: [0n, 4294967295n],
  UINT64: [0n, 18446744073709551615n],
  INT8: [-128n, 127n],
  INT16: [-32768n, 32767n],
  INT32: [-2147483648n, 2147483647n],
  INT64: [-9223372036854775808n, 9223372036854775807n],
};
const FREE_SIDE = 224;
const MAX_ELEMENTS = 4_000_000;

/** Return the product of the dimensions. */
export function countOf(dimensions) {
  return dimensions.reduce((product, size) => product * size, 1);
}

/** Return a shape for one row. Free dimensions become 1, or 224 for the sides of an image. */
export function defaultShape({ shape }) {
  const isImage = shape.length === 4 && [1, 3].includes(shape[1]);
  return shape.map((size, axis) => (size >= 0 ? size : isImage && axis > 1 ? FREE_SIDE : 1));
}

/** Parse a shape such as `1,3,224,224`, which must fit the declared one. Throws Error with the expected shape. */
export function parseShape(text, tensor) {
  const parts = text.trim() === "" ? [] : text.split(",").map((part) => part.trim());
  const dimensions = parts.map(Number);
  if (!dimensions.every((size) => Number.isSafeInteger(size) && size >= 0) || parts.includes("")) {
    throw new Error(`shape of ${tensor.name}: expected numbers separated by commas, got '${text}'`);
  }
  const fits = (size, axis) => tensor.shape[axis] < 0 || tensor.shape[axis] === size;
  if (!tensor.any_shape && (dimensions.length !== tensor.shape.length || !dimensions.every(fits))) {
    throw new Error(`shape of ${tensor.name}: expected [${tensor.shape}], got [${dimensions}]`);
  }
  if (countOf(dimensions) > MAX_ELEMENTS) {
    throw new Error(`shape of ${tensor.name}: expected at most ${MAX_ELEMENTS} elements, got ${countOf(dimensions)}`);
  }
  return dimensions;
}

/**
 * Parse the values of a tensor: numbers or booleans separated by spaces, commas or brackets; for BYTES one text a line.
 *
 * Returns one token of JSON for each element. A single value fills the whole tensor. Throws Error with the expected value.
 */
export function parseValues(text, { name, datatype }, dimensions) {
  const count = countOf(dimensions);
  const given = datatype === "BYTES" ? text.split("\n") : text.split(/[\s,[\]]+/).filter(Boolean);
  const tokens = given.map((value) => tokenOf(value, name, datatype));
  if (tokens.length === 1 && count !== 1) return Array(count).fill(tokens[0]);
  if (tokens.length !== count) {
    throw new Error(`values of ${name}: expected ${count} or a single one, got ${tokens.length}`);
  }
  return tokens;
}

function tokenOf(value, name, datatype) {
  const wrong = (expected) => new Error(`values of ${name}: expected ${expected}, got '${value.slice(0, 40)}'`);
  if (datatype === "BYTES") return JSON.stringify(value);
  if (datatype === "BOOL") {
    if (["true", "1"].includes(value.toLowerCase())) return "true";
    if (["false", "0"].includes(value.toLowerCase())) return "false";
    throw wrong("true or false");
  }
  if (datatype in INTEGERS) {
    const [least, most] = INTEGERS[datatype];
    if (!/^[+-]?\d{1,20}$/.test(value)) throw wrong(`an integer for ${datatype}`);
    const integer = BigInt(value.replace("+", ""));
    if (integer < least || integer > most) throw wrong(`${least} to ${most} for ${datatype}`);
    return String(integer);
  }
  const number = Number(value);
  if (!Number.isFinite(number)) throw wrong(`a finite number for ${datatype}`);
  return JSON.stringify(number);
}

/** Return a random value as the user could type it. */
export function randomValue(datatype) {
  if (datatype === "BOOL") return String(Math.random() < 0.5);
  if (datatype in INTEGERS) return String(Math.floor(Math.random() * 10));
  return datatype === "BYTES" ? Math.random().toString(36).slice(2, 8) : Math.random().toFixed(4);
}

/** Return the body of an infer request. Each of `inputs` has a tensor (name and datatype), a shape and tokens. */
export function requestText(inputs, parameters) {
  const entries = inputs.map(
    ({ tensor, shape, tokens }) =>
      `{"name":${JSON.stringify(tensor.name)},"shape":[${shape}],"datatype":"${tensor.datatype}","data":[${tokens}]}`,
  );
  const more = Object.keys(parameters).length ? `"parameters":${JSON.stringify(parameters)},` : "";
  return `{${more}"inputs":[${entries}]}`;
}

/**
 * Parse an answer. Integers beyond 2^53 become texts with all digits, if the browser supports this. The bare tokens NaN,
 * Infinity and -Infinity, which JSON does not know, become texts.
 */
export function parseAnswer(text) {
  const json = text.replace(/"[^"\\]*(?:\\.[^"\\]*)*"|-?(?:NaN|Infinity)/g, (part) => (part[0] === '"' ? part : `"${part}"`));
  return JSON.parse(json, (key, value, context) =>
    typeof value === "number" && Number.isInteger(value) && !Number.isSafeInteger(value) && context?.source
      ? context.source
      : value,
  );
}
