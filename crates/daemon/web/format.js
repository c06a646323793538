// Numbers and times for people, and elements of text. Knows neither the API nor the page.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/** Bytes in powers of 1024, three digits. */
export function bytes(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  let size = Math.abs(value);
  let unit = 0;
  while (size >= 1023.5 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  const digits = unit === 0 || size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
  const text = size.toFixed(digits);
  return `${value < 0 ? "−" : ""}${digits ? text.replace(/\.?0+$/, "") : text} ${UNITS[unit]}`;
}

export const rate = (value) => (value == null ? "–" : `${bytes(value)}/s`);

/** A count in powers of 1000. */
export function count(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 999.5e6) return `${(value / 1e9).toFixed(1)} G`;
  if (size >= 999.5e3) return `${(value / 1e6).toFixed(1)} M`;
  if (size >= 9999.5) return `${(value / 1e3).toFixed(1)} k`;
  return size >= 10 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(1);
}

/** Microseconds. */
export function micros(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  if (value >= 999.5e3) return `${trim(value / 1e6)} s`;
  if (value >= 999.5) return `${trim(value / 1e3)} ms`;
  return `${Math.round(value)} µs`;
}

const trim = (value) => (value >= 99.5 ? value.toFixed(0) : value >= 9.95 ? value.toFixed(1) : value.toFixed(2)).replace(/\.0+$/, "");

export const percent = (value) => (value == null ? "–" : `${Number.isInteger(value) || value >= 99.95 || value < 0.05 ? Math.round(value) : value.toFixed(1)} %`);

/** How long something takes, from seconds. */
export function duration(seconds) {
  if (seconds == null || !Number.isFinite(seconds)) return "an unknown time";
  if (seconds < 1) return "less than a second";
  const parts = [[86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]];
  for (const [size, name] of parts) {
    if (seconds >= size) {
      const n = Math.round(seconds / size);
      return `${n} ${name}${n === 1 ? "" : "s"}`;
    }
  }
  return "";
}

/** A count for each second. */
export const perSecond = (value) => (value == null ? "–" : `${count(value)}/s`);

/** A value of a tunable with its unit: all sizes in powers of 1024, all times in ms, s or µs. */
export function setting(value, unit) {
  if (value === "") return "–";
  const n = Number(value);
  if (unit === "bytes") return bytes(n);
  if (unit === "bytes/s") return rate(n);
  if (unit === "sectors") return bytes(n * 512);
  if (unit === "sectors/s") return rate(n * 512);
  if (unit === "us") return n ? micros(n) : "0";
  if (unit === "I/Os") return `${count(n)} requests`;
  return unit ? `${value} ${unit}` : value;
}

export const clock = (ms) => new Date(ms).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });

/** A time with its date, from seconds since 1970. */
export const moment = (seconds) => new Date(seconds * 1000).toLocaleString([], { day: "numeric", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit", hour12: false });

/** An element with properties (`class`, `on…`, `data-…`, `aria-…` or any of its own) and children, which are text or elements. */
export function el(name, props = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(props)) {
    if (value == null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key in element && !key.startsWith("aria") && key !== "list" && key !== "form") element[key] = value;
    else element.setAttribute(key === "class" ? "class" : key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((c) => c != null && c !== false));
  return element;
}

/** A message as the parts of an element: what is between backticks is code. */
export function prose(text) {
  return text.split("`").map((part, n, all) => (n % 2 === 0 ? part : n < all.length - 1 ? el("code", {}, part) : `\`${part}`));
}

/** Sets text only where it is another, so that nothing is drawn anew and no selection is lost. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
