// The Gantt chart of jobs on slots. It draws only the chosen nodes and stretch of time, so long runs stay fast.
const MAX_ROWS = 96, OVERVIEW_ROWS = 1600, SHORTEST_VIEW_S = 10;

// [GPU type, slots] of every node.
const nodesOfReport = report.node_types.flatMap(({ gpu_type, nodes, gpus_per_node }) => Array(nodes).fill([gpu_type, gpus_per_node]));
const heldRead = {};

// Reads the periods in which jobs held GPUs of a node under a policy, once.
function heldBy(number) {
  heldRead[number] ||= (async () => {
    const { about, columns } = await unpackedColumns(`held-${number}`);
    const start = summed(columns.started_after_last).map((at) => at * about.unit_s);
    return { about, ...columns, start, end: start.map((at, row) => at + columns.length[row] * about.unit_s) };
  })();
  return heldRead[number];
}

async function gantt() {
  const place = section("gantt");
  const [unit, units] = report.units;
  const canvas = element("canvas", { id: "gantt-canvas", tabindex: 0, role: "img" });
  const context = canvas.getContext("2d");
  const tip = element("div", { class: "tip", hidden: true });
  const nodes = nodesOfReport;
  const firstRow = [0];
  nodes.forEach(([, slots]) => firstRow.push(firstRow.at(-1) + slots));
  const pages = pagesOf(nodes, firstRow);
  const policy = select(report.gantt.map((number, at) => [at, report.policies[number].label]));
  const page = select(pages.map(({ text }, at) => [at, text]));
  const position = element("input", { type: "range", min: 0, max: 1000, "aria-label": "position in the run" });
  const said = element("p", { class: "soft", "aria-live": "polite" });
  let held, span = [0, 1], view = [0, 1], patterns;
  if (pages.length > 1 && firstRow.at(-1) > MAX_ROWS) page.value = 1;

  const set = (start, end) => {
    const length = Math.min(Math.max(end - start, SHORTEST_VIEW_S), span[1] - span[0]);
    const from = Math.min(Math.max(start, span[0]), span[1] - length);
    view = [from, from + length];
    draw();
  };
  const shift = (share) => set(view[0] + share * (view[1] - view[0]), view[1] + share * (view[1] - view[0]));
  const zoom = (factor, at = 0.5) => {
    const middle = view[0] + at * (view[1] - view[0]), length = (view[1] - view[0]) * factor;
    set(middle - at * length, middle + (1 - at) * length);
  };
  const turn = (step) => {
    page.value = Math.min(Math.max(Number(page.value) + step, 0), pages.length - 1);
    draw();
  };
  place.replaceChildren(
    element("div", { class: "controls" }, element("label", {}, "under", policy), element("label", {}, "nodes", page),
      button("▲", "nodes before", () => turn(-1)), button("▼", "nodes after", () => turn(1))),
    element("div", { class: "controls" }, button("◀", "earlier", () => shift(-0.5)), button("▶", "later", () => shift(0.5)),
      button("+", "zoom in", () => zoom(0.5)), button("−", "zoom out", () => zoom(2)), button("whole run", "all of time", () => set(...span)),
      button("longest queue", "the busiest stretch of the first policy", () => set(...report.busy)), position),
    sizeLegend(), canvas, said, tip);

  function hatch(colour, kind) {
    const tile = document.createElement("canvas"), size = 6;
    tile.width = tile.height = size;
    const pen = tile.getContext("2d");
    pen.fillStyle = colour;
    pen.fillRect(0, 0, size, size);
    pen.strokeStyle = pen.fillStyle = styleOf("--page");
    pen.globalAlpha = 0.35;
    if (kind === 1) pen.fillRect(2, 2, 2, 2);
    if (kind >= 2) { pen.beginPath(); pen.moveTo(0, size); pen.lineTo(size, 0); pen.stroke(); }
    if (kind === 3) { pen.beginPath(); pen.moveTo(0, 0); pen.lineTo(size, size); pen.stroke(); }
    return context.createPattern(tile, "repeat");
  }
  function sizeLegend() {
    const line = element("div", { class: "controls soft" });
    line.fill = () => line.replaceChildren(...report.sizes.map((text, size) => {
      const sample = element("canvas", { width: 26, height: 13, "aria-hidden": true });
      const pen = sample.getContext("2d");
      pen.fillStyle = patterns[size];
      pen.fillRect(0, 0, 26, 13);
      return element("span", {}, sample, ` ${text} ${size ? units : unit}`);
    }), element("span", {}, "empty: idle"));
    return line;
  }
  function restyle() {
    patterns = report.sizes.map((_, size) => hatch(styleOf(`--s${size}`), size));
    place.children[2].fill();
    if (held) draw();
  }

  async function load() {
    held = await heldBy(report.gantt[policy.value]);
    const last = held.end.reduce((most, end) => Math.max(most, end), 1);
    span = [0, last];
    set(...(view[1] === 1 ? report.busy : view));
  }

  const margin = () => ({ left: canvas.clientWidth < 600 ? 52 : 74, bottom: 26 });
  function geometry() {
    const { from, to } = pages[page.value];
    const rows = firstRow[to] - firstRow[from];
    const height = Math.max(160, Math.min(rows * (rows <= MAX_ROWS ? (rows <= 24 ? 14 : 7) : 2), 900));
    return { from, to, rows, height, row: height / rows, ...margin() };
  }
  const slotMask = (row, slot) => (slot < 32 ? (held.low_mask[row] / 2 ** slot) & 1 : (held.high_mask[row] / 2 ** (slot - 32)) & 1);

  function draw() {
    const { from, to, height, row: tall, left, bottom } = geometry();
    const wide = canvas.clientWidth - left, ratio = window.devicePixelRatio || 1;
    canvas.style.height = `${height + bottom}px`;
    canvas.width = Math.round(canvas.clientWidth * ratio);
    canvas.height = Math.round((height + bottom) * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const [start, end] = view, scale = wide / (end - start), base = firstRow[from];
    context.fillStyle = styleOf("--idle");
    context.fillRect(left, 0, wide, height);
    context.strokeStyle = styleOf("--page");
    context.lineWidth = 0.6;
    let rectangles = 0;
    for (let at = 0; at < held.start.length && held.start[at] < end; at += 1) {
      const node = held.node[at];
      if (held.end[at] <= start || node < from || node >= to) continue;
      rectangles += 1;
      const x = left + Math.max(0, (held.start[at] - start) * scale);
      const width = Math.max(left + Math.min(wide, (held.end[at] - start) * scale) - x, 0.5);
      context.fillStyle = patterns[sizeOf(held.gpus[at])];
      const slots = nodes[node][1];
      for (let slot = 0; slot < slots; slot += 1) {
        if (!slotMask(at, slot)) continue;
        let after = slot + 1;
        while (after < slots && slotMask(at, after)) after += 1;
        const y = (firstRow[node] - base + slot) * tall;
        context.fillRect(x, y, width, (after - slot) * tall);
        if (width > 3 && tall > 3) context.strokeRect(x, y, width, (after - slot) * tall);
        slot = after;
      }
    }
    axes(from, to, height, tall, left, wide);
    tell(from, to, rectangles);
    position.value = span[1] - span[0] > end - start ? (1000 * (start - span[0])) / (span[1] - span[0] - (end - start)) : 0;
  }
  function axes(from, to, height, tall, left, wide) {
    const text = styleOf("--text"), soft = styleOf("--soft");
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    let lastY = -20;
    for (let node = from; node < to; node += 1) {
      const y = (firstRow[node] - firstRow[from]) * tall, middle = y + (nodes[node][1] * tall) / 2;
      if (nodes[node][1] * tall > 6) { context.fillStyle = soft; context.fillRect(left - 4, y, wide + 4, 0.6); }
      if (middle - lastY < 13) continue;
      context.fillStyle = text;
      context.fillText(`node ${node}`, left - 7, middle);
      lastY = middle;
    }
    const step = TICKS_S.find((each) => (view[1] - view[0]) / each <= Math.max(2, wide / 110)) || TICKS_S.at(-1);
    context.textAlign = "center";
    context.fillStyle = text;
    // Ticks are at full hours and days of the trace's clock, not of the time since the window's start.
    const offset = report.origin_s % step;
    for (let at = Math.ceil((view[0] + offset) / step) * step - offset; at <= view[1]; at += step) {
      const x = left + ((at - view[0]) / (view[1] - view[0])) * wide, stamp = clock(at);
      context.fillRect(x, height, 0.7, 5);
      if (x > left + 30 && x < left + wide - 30) context.fillText(step >= 86400 ? stamp.slice(0, 10) : step >= 60 ? stamp.slice(5, 16) : stamp.slice(11), x, height + 15);
    }
  }
  function tell(from, to, rectangles) {
    const { about } = held, name = report.policies[report.gantt[policy.value]].label;
    const part = about.left_out_up_to_s === null ? "" : ` Left out to keep this page small: ${count(about.total - about.shown)} of ${count(about.total)} stretches, `
      + `of ${duration(about.left_out_up_to_s)} or less each, together ${TEXTS.percent(100 * about.left_out_share)} of the time held.`;
    const text = `${name}, ${pages[page.value].text}, ${clock(view[0])} to ${clock(view[1])} UTC (${duration(view[1] - view[0])} of ${duration(span[1])}): `
      + `${count(rectangles)} stretches, a row per ${unit}.${part}`;
    said.textContent = text;
    canvas.setAttribute("aria-label", text);
  }
  async function point(event) {
    const { from, to, rows, row: tall, left, height } = geometry();
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    tip.hidden = true;
    if (x < left || y >= height) return;
    const at = view[0] + ((x - left) / (box.width - left)) * (view[1] - view[0]), line = firstRow[from] + Math.min(rows - 1, Math.floor(y / tall));
    let node = from;
    while (node < to - 1 && firstRow[node + 1] <= line) node += 1;
    const slot = line - firstRow[node];
    const hit = held.start.findIndex((start, row) => start <= at && held.end[row] > at && held.node[row] === node && slotMask(row, slot));
    const here = [`node ${node} (${nodes[node][0]}), ${unit} ${slot}, ${clock(at)}`];
    if (hit < 0) here.push("idle");
    else here.push(await jobName(held.job[hit]), `${count(held.gpus[hit])} ${held.gpus[hit] > 1 ? units : unit}, ${duration(held.end[hit] - held.start[hit])}: ${clock(held.start[hit])} to ${clock(held.end[hit])}`, ...(held.reason[hit] ? [`stopped: ${held.about.reasons[held.reason[hit]]}`] : []));
    tip.replaceChildren(...here.flatMap((text, number) => (number ? [element("br"), text] : [text])));
    tip.hidden = false;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
  }
  async function jobName(id) {
    const read = await readJobs(), row = read.rowOf.get(id);
    const same = read.about.policies.includes(report.gantt[policy.value]);
    return row === undefined || !same ? `job ${id} (by its row)` : read.name[row];
  }
  const keys = { ArrowLeft: () => shift(-0.25), ArrowRight: () => shift(0.25), "+": () => zoom(0.5), "=": () => zoom(0.5),
    "-": () => zoom(2), PageUp: () => turn(-1), PageDown: () => turn(1), Home: () => set(...span) };
  canvas.addEventListener("keydown", (event) => {
    if (keys[event.key]) { keys[event.key](); event.preventDefault(); }
  });
  canvas.addEventListener("pointermove", (event) => {
    if (event.buttons === 1 && event.pointerType === "mouse") shift(-event.movementX / (canvas.clientWidth - margin().left));
    else point(event);
  });
  canvas.addEventListener("pointerdown", point);
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const box = canvas.getBoundingClientRect(), left = margin().left;
    zoom(event.deltaY > 0 ? 1.25 : 0.8, Math.min(Math.max((event.clientX - box.left - left) / (box.width - left), 0), 1));
  }, { passive: false });
  position.addEventListener("input", () => {
    const length = view[1] - view[0], start = span[0] + (position.value / 1000) * (span[1] - span[0] - length);
    set(start, start + length);
  });
  policy.addEventListener("change", load);
  page.addEventListener("change", draw);
  addEventListener("resize", draw);
  listeners.theme.push(restyle);
  restyle();
  await load();
}

const sizeOf = (gpus) => report.size_limits.filter((limit) => gpus > limit).length;

// The pages of the chart: all nodes if there are few enough, then groups of nodes of one type.
function pagesOf(nodes, firstRow) {
  const pages = [];
  const name = (from, to) => (to - from === 1 ? `node ${from}` : `nodes ${from}–${to - 1}`);
  for (let from = 0; from < nodes.length;) {
    let to = from + 1;
    while (to < nodes.length && nodes[to][0] === nodes[from][0] && firstRow[to + 1] - firstRow[from] <= MAX_ROWS) to += 1;
    pages.push({ from, to, text: `${name(from, to)} · ${nodes[from][0]}` });
    from = to;
  }
  if (pages.length > 1 && firstRow.at(-1) <= OVERVIEW_ROWS) pages.unshift({ from: 0, to: nodes.length, text: `all ${nodes.length} nodes` });
  return pages;
}
