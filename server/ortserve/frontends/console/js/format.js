// Numbers in words, short enough for a table.

/** A number with three digits, without an exponent. */
export function number(value) {
  if (value === 0) return "0";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

/** A number, or nothing for 0, so that busy models stand out. */
export function orNothing(value) {
  return value ? number(value) : "";
}

/** A share as percent. */
export function percent(share) {
  return `${number(100 * share)} %`;
}

/** A duration of so many milliseconds. */
export function milliseconds(value) {
  if (!value) return "";
  if (value < 1) return `${number(value * 1000)} µs`;
  return value < 1000 ? `${number(value)} ms` : `${number(value / 1000)} s`;
}

/** A size in memory or on disk. */
export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${number(value)} ${units[unit]}`;
}

/** A duration of so many seconds, by its two largest units. */
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

/** A shape as the protocol's errors show it. */
export function shape(dimensions) {
  return `[${dimensions.join(",")}]`;
}
