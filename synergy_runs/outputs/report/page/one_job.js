// One job under every policy that is shown: when it waited, on what it ran and with which batch. A job is chosen in the list.
const HOUR_S = 3600;

// The job's waits and runs in order; a wait has no GPUs. As `_stretches` in synergy_runs/outputs/history.py.
function stretchesOf(held, id, submitted) {
  const found = [];
  let since = submitted;
  for (let row = 0; row < held.start.length; row += 1) {
    if (held.job[row] !== id) continue;
    const last = found.at(-1), start = held.start[row];
    if (last && last.gpus && last.start === start) { // a further node of the same start
      last.nodes += 1;
      continue;
    }
    if (start > since) found.push({ start: since, end: start, gpus: 0 });
    since = held.end[row];
    const batches = held.first_batch ? [held.first_batch[row], held.last_batch[row]] : [0, 0];
    found.push({ start, end: since, gpus: held.gpus[row], nodes: 1, type: nodesOfReport[held.node[row]]?.[0], batches, stop: report.stops[held.reason[row]] });
  }
  return found;
}

function inWords({ gpus, nodes, type, batches, stop }) {
  if (!gpus) return "waited";
  const [first, last] = batches;
  return (type ? `${gpus} × ${type}` : `${count(gpus)} ${gpus > 1 ? report.units[1] : report.units[0]}`) + (nodes > 1 ? ` on ${nodes} nodes` : "")
    + (first ? `, batch ${first}${last === first ? "" : ` → ${last}`}` : "") + (stop ? `; then ${stop}` : "");
}

// A bar per policy: grey where the job waited, else as high as the number of its GPUs.
function bars(policies, end, start) {
  const most = Math.max(1, ...policies.flatMap(({ stretches }) => stretches.map(({ gpus }) => gpus)));
  const space = "http://www.w3.org/2000/svg", tall = 34, wide = 1000;
  const svg = document.createElementNS(space, "svg");
  const draw = (tag, attributes) => {
    const made = document.createElementNS(space, tag);
    Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
    svg.append(made);
    return made;
  };
  const x = (at) => ((at - start) / Math.max(end - start, 1e-9)) * wide;
  Object.entries({ viewBox: `0 0 ${wide} ${policies.length * tall}`, preserveAspectRatio: "none", height: policies.length * tall, "aria-hidden": "true" }).forEach(
    ([name, value]) => svg.setAttribute(name, value));
  policies.forEach(({ number, stretches }, at) => stretches.forEach((each) => {
    const height = each.gpus ? Math.max(3, ((tall - 8) * each.gpus) / most) : 2;
    draw("rect", { x: x(each.start), y: (at + 1) * tall - height, width: Math.max(x(each.end) - x(each.start), 0.5), height,
      fill: each.gpus ? `var(--p${number})` : "var(--soft)" });
  }));
  const names = element("div", { class: "names" }, ...policies.map(({ number }) => element("span", { style: `height:${tall}px` }, report.policies[number].label)));
  const ends = element("div", { class: "soft ends" }, ...[start, end].map((at) => element("span", {}, `${(at / HOUR_S).toFixed(2)} h`)));
  return element("div", { class: "bars" }, names, element("div", {}, svg, ends));
}

function stretchTable(label, stretches) {
  const shortest = Math.min(HOUR_S, ...stretches.map(({ start, end }) => end - start).filter((each) => each > 0));
  const digits = Math.min(Math.max(Math.ceil(-Math.log10(shortest / HOUR_S)), 2), 5);
  const { unit, text } = inOneUnit("duration", stretches.map(({ start, end }) => end - start));
  const hours = (seconds) => element("td", { title: clock(seconds) }, (seconds / HOUR_S).toFixed(digits));
  const head = ["from, h", "to, h", `lasted, ${unit}`, ""].map((each) => element("th", { scope: "col" }, each));
  const body = stretches.map((each) => element("tr", { class: each.gpus ? null : "waits" },
    hours(each.start), hours(each.end), element("td", {}, text(each.end - each.start)), element("td", { class: "text" }, inWords(each))));
  return element("table", { "aria-label": `what the job went through under ${label}` }, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body));
}

let chosenJob = null;

// Shows the job in this row of the list.
async function showJob(row) {
  chosenJob = row;
  const place = section("one-job"), read = await readJobs(), id = read.columns.id[row];
  const numbers = read.about.policies.filter((number) => shown.has(number));
  const policies = await Promise.all(numbers.map(async (number) => ({ number, stretches: stretchesOf(await heldBy(number), id, read.submitted[row]) })));
  if (chosenJob !== row) return; // another was chosen meanwhile
  const gpus = read.columns.gpus[row];
  const cards = policies.map(({ number, stretches }) => {
    const { label } = report.policies[number], { waiting, jct, preemptions } = read.fared[number];
    const runs = stretches.filter((each) => each.gpus).length, missing = preemptions[row] + 1 - runs;
    const stops = ["never stopped", "stopped once"][preemptions[row]] || `stopped ${count(preemptions[row])} times`;
    return element("div", { class: "card" }, element("h4", {}, swatch(number), " ", label),
      element("p", { class: "soft" }, `JCT ${duration(jct[row])}, waited ${duration(waiting[row])}, ${stops}`),
      ...(missing > 0 ? [element("p", { class: "soft" }, `${count(missing)} short runs are not in this page; explain prints them.`)] : []),
      element("div", { class: "wide", tabindex: 0 }, stretchTable(label, stretches)));
  });
  const ends = policies.flatMap(({ stretches }) => stretches.map(({ end }) => end));
  place.replaceChildren(
    element("h3", { tabindex: -1 }, `${read.name[row]} under every policy`),
    element("p", { class: "soft" }, `${count(gpus)} ${gpus > 1 ? report.units[1] : report.units[0]} requested; submitted at ${(read.submitted[row] / HOUR_S).toFixed(2)} h (${clock(read.submitted[row])} UTC). `
      + "Hours count from the window's start, as in --at 3h of python -m synergy_sim.explain. Bars: thin while it waited, else as high as its GPUs."),
    ...(ends.length ? [bars(policies, Math.max(...ends), read.submitted[row])] : []), element("div", { class: "cards" }, ...cards));
}

listeners.shown.push(() => { if (chosenJob !== null) showJob(chosenJob); });
