// The shown policies and the theme, light or dark; charts and tables register listeners for changes.
const every = [...report.policies.keys()];
const atFirst = every.filter((number) => report.policies[number].at_first);
const shown = new Set(atFirst);
const listeners = { shown: [], theme: [], paper: [] };
const tell = (what) => listeners[what].forEach((hear) => hear());
const colourOf = (number) => styleOf(`--p${number}`);

const MARKS = {
  circle: "M8 4a4 4 0 1 0 .01 0z", square: "M4.5 4.5h7v7h-7z", triangle: "M8 3.5l4.8 8.5h-9.6z",
  square_pin: "M4 4q4 2.6 8 0q-2.6 4 0 8q-4-2.6-8 0q2.6-4 0-8z",
  diamond: "M8 3l3.8 5-3.8 5-3.8-5z", inverted_triangle: "M8 12.5l4.8-8.5h-9.6z",
  plus: "M6.7 3.5h2.6v3.2h3.2v2.6h-3.2v3.2h-2.6v-3.2h-3.2v-2.6h3.2z",
  star: "M8 2.6l1.5 3.7 4 .3-3 2.6.9 3.9L8 11l-3.4 2.1.9-3.9-3-2.6 4-.3z", hex: "M5.5 4h5l2.5 4-2.5 4h-5L3 8z",
  x: "M4 5.2L5.2 4 8 6.8 10.8 4 12 5.2 9.2 8l2.8 2.8-1.2 1.2L8 9.2 5.2 12 4 10.8 6.8 8z",
  asterisk: "M7.3 3h1.4v3.7l3.2-1.8.7 1.2L9.4 8l3.2 1.9-.7 1.2-3.2-1.8V13H7.3V9.3l-3.2 1.8-.7-1.2L6.6 8 3.4 6.1l.7-1.2 3.2 1.8z",
};

// A short line with a marker, shown before a policy's name.
function swatch(number) {
  const { mark, hollow, dashed } = report.policies[number];
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const draw = (attributes) => {
    const path = document.createElementNS(space, "path");
    Object.entries(attributes).forEach(([name, value]) => path.setAttribute(name, value));
    svg.append(path);
  };
  Object.entries({ class: "swatch", width: 34, height: 16, viewBox: "-9 0 34 16", "aria-hidden": "true" }).forEach(
    ([name, value]) => svg.setAttribute(name, value));
  const colour = `var(--p${number})`;
  draw({ d: "M-9 8h34", stroke: colour, "stroke-width": 2, "stroke-dasharray": dashed ? "5 3" : "none" });
  draw({ d: MARKS[mark], fill: hollow ? "var(--page)" : colour, stroke: colour, "stroke-width": hollow ? 1.5 : 0 });
  return svg;
}

function policyBar() {
  const bar = section("policies");
  const several = report.policies.length > 1;
  bar.hidden = !several;
  const chips = report.policies.map(({ label }, number) =>
    element("button", { type: "button", "data-policy": label, onclick: () => {
      if (!shown.delete(number)) shown.add(number);
      tell("shown");
    } }, swatch(number), label));
  const some = (text, numbers) => element("button", { type: "button", class: "all", onclick: () => {
    shown.clear();
    numbers.forEach((number) => shown.add(number));
    tell("shown");
  } }, text);
  const others = [some("all", every)];
  if (atFirst.length < every.length) others.unshift(some("as at first", atFirst));
  bar.replaceChildren(...chips, ...(several ? [...others, some("none", [])] : []));
  const press = () => chips.forEach((chip, number) => chip.setAttribute("aria-pressed", shown.has(number)));
  listeners.shown.push(press);
  press();
  document.querySelectorAll("th[data-number]").forEach((cell) => cell.prepend(swatch(Number(cell.dataset.number)), " "));
}

function themeSwitch() {
  const button = section("theme");
  const dark = () => {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  const name = () => { button.textContent = dark() ? "Light" : "Dark"; };
  const set = (theme) => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    name();
    tell("theme");
  };
  button.addEventListener("click", () => set(dark() ? "light" : "dark"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => set(document.documentElement.dataset.theme));
  let before, folded;
  addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme;
    folded = [...document.querySelectorAll("details:not([open])")];
    folded.forEach((details) => { details.open = !details.closest("figure"); });
    set("light");
    tell("paper");
  });
  addEventListener("afterprint", () => {
    folded.forEach((details) => { details.open = false; });
    set(before);
  });
  button.hidden = false;
  name();
}
