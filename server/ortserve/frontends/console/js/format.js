// Numbers as texts that are short enough for a table.

/** Format a number with three digits, without an exponent. */
export function number(value) {
  if (value === 0) return "0";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

/** Format a number; 0 becomes an empty text, so that busy models stand out. */
export function orNothing(value) {
  return value ? number(value) : "";
}

/** Format a share as percent. */
export function percent(share) {
  return `${number(100 * share)} %`;
}

/** Format a duration in milliseconds. */
export function milliseconds(value) {
  if (!value) return "";
  if (value < 1) return `${number(value * 1000)} µs`;
  return value < 1000 ? `${number(value)} ms` : `${number(value / 1000)} s`;
}

/** Format a size in bytes. */
export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${number(value)} ${units[unit]}`;
}

/** Format a duration in seconds by its two largest units. */
export function duration(seconds) {
  const parts = [
    [Math.floor(seconds / 86400), "d"],
    [Math.floor(seconds / 3600) % 24, "h"],
    [Math.floor(seconds / 60) % 60, "min"],
    [Math.floor(seconds) % 60, "s"],
  ];
  const first = parts.findIndex(([count]) => count > 0);
  if (first < 0) return "0 s";
  return parts.slice(first, first + 2).map(([count, unit]) => `${count} ${unit}`).join(" ");
}

/** Format a shape as in the errors of the server. */
export function shape(dimensions) {
  return `[${dimensions.join(",")}]`;
}
