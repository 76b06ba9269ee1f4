// Formats numbers and times, and makes HTML elements.
const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

function threeDigits(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  const decimals = size === 0 || size >= 99.95 ? 0 : size >= 9.995 ? 1 : size >= 0.0995 ? 2 : 3;
  return value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

function duration(seconds) {
  if (seconds === null || !Number.isFinite(seconds) || seconds < 0) return "–";
  if (seconds > 0 && seconds < 1) return `${Number((seconds * 1000).toPrecision(3))} ms`;
  const [scale, unit] = UNITS.find(([each]) => seconds >= 2 * each) || UNITS[3];
  return `${Number((seconds / scale).toPrecision(3))} ${unit}`;
}

function count(value) {
  return value === null ? "–" : value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
}

// One unit for all durations of a table or column, by their median: {unit, text}. Other kinds have no unit of their own.
function inOneUnit(kind, values) {
  if (kind !== "duration") return { unit: "", text: TEXTS[kind] };
  const known = [...values].filter((value) => value > 0 && Number.isFinite(value)).sort((one, other) => one - other);
  const typical = known.length ? (known[(known.length - 1) >> 1] + known[known.length >> 1]) / 2 : 0;
  const [scale, unit] = UNITS.find(([seconds]) => typical >= 2 * seconds) || UNITS[3];
  return { unit, text: (value) => threeDigits(value === null ? null : value / scale) };
}

// Formats seconds since the window's start as date and time of the trace's clock.
function clock(seconds) {
  return new Date((report.origin_s + seconds) * 1000).toISOString().slice(0, 19).replace("T", " ");
}

const TEXTS = {
  duration,
  count,
  percent: (value) => (value === null ? "–" : `${Number(value.toPrecision(3))} %`),
  number: threeDigits,
  date: clock,
};

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

const button = (text, title, onclick) => element("button", { type: "button", title, "aria-label": title, onclick }, text);
const select = (options) => element("select", {}, ...options.map(([value, text]) => element("option", { value }, text)));
const escaped = (text) => String(text).replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
const styleOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
