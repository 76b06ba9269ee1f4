// Charts, drawn by Bokeh: lines over one axis that all policies share, or markers by class.
const TICKS_S = [0.001, 0.01, 0.1, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200,
  86400, 172800, 345600, 604800, 1209600, 2592000, 5184000, 10368000, 31536000];
const TICKS_LOG_S = [0.001, 0.01, 0.1, 1, 10, 60, 600, 3600, 21600, 86400, 604800, 2592000, 31536000];
const NUMBERS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 1e4, 1e5];
const MINUTE_S = 60;
// A scale that is linear below a minute and logarithmic above, as in the PNG figures.
const bent = (seconds) => (seconds <= MINUTE_S ? seconds / MINUTE_S / 2 : 0.5 + Math.log10(seconds / MINUTE_S));

// Formats a tick, a round number of seconds: `1 h`, not `60 min`.
function roundDuration(seconds) {
  if (seconds === 0) return "0";
  const [scale, unit] = UNITS.find(([each]) => seconds >= each) || [0.001, "ms"];
  return `${Number((seconds / scale).toPrecision(6))} ${unit}`;
}

// Formats a tick of a linear axis: all in the largest unit of which they are multiples.
function evenDuration(seconds, ticks) {
  const [scale, unit] = UNITS.find(([each]) => ticks.every((tick) => tick % each === 0)) || [1, "s"];
  return seconds === 0 ? "0" : `${Number((seconds / scale).toPrecision(6))} ${unit}`;
}

window.synergyTicks = (kind, start, end, log) => {
  if (!log && kind === "duration") {
    const step = TICKS_S.find((each) => (end - start) / each <= 7) || TICKS_S.at(-1);
    return [...Array(8).keys()].map((at) => (Math.ceil(start / step) + at) * step).filter((at) => at <= end);
  }
  const [rough, fine] = kind === "duration" ? [TICKS_LOG_S, TICKS_S] : [NUMBERS.filter((each) => /^1|^0\.0*1$/.test(each)), NUMBERS];
  const within = (ticks) => ticks.filter((at) => at >= start && at <= end);
  return within(rough).length >= 3 ? within(rough) : within(fine);
};
window.synergyText = { duration: roundDuration, even: evenDuration, number: (value) => String(Number(value.toPrecision(6))), percent: String, count };

// Markers that are hollow or consist of strokes need thicker lines.
const strokeOf = (number) => (["x", "asterisk"].includes(report.policies[number].mark) ? 2.2 : report.policies[number].hollow ? 1.6 : 1);

const ticker = (kind, log) => new Bokeh.CustomJSTicker({
  major_code: `return synergyTicks("${kind}", cb_data.start, cb_data.end, ${log})` });
const formatter = (kind) => new Bokeh.CustomJSTickFormatter({ code: `return synergyText["${kind}"](tick, ticks)` });

function restyled(figure) {
  const [text, soft, line] = ["--text", "--soft", "--line"].map(styleOf);
  Object.assign(figure, { background_fill_color: null, border_fill_color: null, outline_line_color: null });
  for (const axis of [...figure.xaxes, ...figure.yaxes]) Object.assign(axis, {
    axis_line_color: soft, major_tick_line_color: soft, minor_tick_line_color: null, major_label_text_color: soft,
    axis_label_text_color: text, major_label_text_font_size: "12px", axis_label_text_font_size: "13px",
    axis_label_text_font_style: "normal" });
  for (const grid of [...figure.xgrids, ...figure.ygrids]) grid.grid_line_color = line;
}

const coarse = matchMedia("(pointer: coarse)").matches;

function figureOf(x, panel, height, more) {
  const options = { height, sizing_mode: "stretch_width", min_border_right: 12, toolbar_location: null, tools: [], title: null,
    x_axis_type: x.kind === "date" ? "datetime" : x.log ? "log" : "linear", ...more };
  const figure = Bokeh.Plotting.figure(options);
  // Dragging a mouse zooms. Dragging a finger scrolls the page, so touch screens zoom with buttons.
  if (!coarse) {
    const drag = new Bokeh.BoxZoomTool();
    const wheel = new Bokeh.WheelZoomTool({ dimensions: "width", modifiers: { ctrl: true } });
    figure.add_tools(drag, wheel);
    figure.toolbar.active_drag = drag;
    figure.toolbar.active_scroll = wheel;
  }
  figure.yaxis.axis_label = panel.label;
  if (panel.kind === "duration") Object.assign(figure.yaxis, { ticker: ticker("duration", false), formatter: formatter("even") });
  else figure.yaxis.formatter = formatter(panel.kind);
  if (x.kind === "date") figure.xaxis.formatter = new Bokeh.DatetimeTickFormatter({
    seconds: "%H:%M:%S", minsec: "%H:%M:%S", minutes: "%H:%M", hourmin: "%H:%M", hours: "%H:%M", days: "%m-%d", months: "%Y-%m" });
  else if (x.log) Object.assign(figure.xaxis, { ticker: ticker(x.kind, true), formatter: formatter(x.kind) });
  else if (x.kind === "number") figure.xaxis.formatter = formatter("number");
  return figure;
}

function tipOf(title, lines) {
  return `<div class="tip-in" style="background:${styleOf("--page")};color:${styleOf("--text")};margin:-6px;padding:6px 9px;font:13px system-ui,sans-serif">`
    + `<b>${escaped(title)}</b>${lines.map(([number, text]) => `<br><span style="color:${colourOf(number)}">■</span> ${escaped(report.policies[number].label)}: <b>${escaped(text)}</b>`).join("")}</div>`;
}

// Colours lines and markers of policies for the current theme, light or dark.
function recolour(glyphs) {
  for (const { number, of } of glyphs) for (const { glyph } of of) {
    const hollow = report.policies[number].hollow && "marker" in glyph;
    if ("line_color" in glyph) glyph.line_color = colourOf(number);
    if ("fill_color" in glyph) glyph.fill_color = hollow ? styleOf("--page") : colourOf(number);
  }
}

// Draws the lines of a panel. Returns {show, colour}: call them when the shown policies or the theme change.
function drawLines(chart, panel, figure) {
  const date = chart.x.kind === "date";
  const x = chart.at.map((at) => (date ? (report.origin_s + at) * 1000 : at));
  const present = panel.lines.map((line, number) => [line, number]).filter(([line]) => line);
  const nan = (values) => values.map((value) => (value === null ? NaN : value));
  const data = { x };
  const stops = Math.ceil(x.length / 9);
  for (const [line, number] of present) {
    data[`y${number}`] = nan(line.y);
    if (line.low) Object.assign(data, { [`low${number}`]: nan(line.low), [`high${number}`]: nan(line.high) });
    // Short lines have markers at every point; on others, an offset keeps the policies' markers apart.
    const off = (number * Math.ceil(stops / 3) + number) % stops;
    data[`mark${number}`] = nan(line.y).map((value, at) => (panel.marks || (at + stops - off) % stops === 0 ? value : NaN));
  }
  const source = new Bokeh.ColumnDataSource({ data });
  // An invisible line that reacts to the mouse, so that one tooltip shows all values at an x.
  const pointed = new Bokeh.ColumnDataSource({ data: { x, tip: x.map(() => ""), height: x.map(() => 0) } });
  const glyphs = present.map(([line, number]) => {
    const { mark, dashed } = report.policies[number];
    const of = [];
    if (line.low) of.push(figure.varea({ field: "x" }, { field: `low${number}` }, { field: `high${number}` }, { source, fill_alpha: 0.13 }));
    of.push(figure.line({ field: "x" }, { field: `y${number}` }, { source, line_width: 2, line_dash: dashed ? [6, 3] : [] }));
    of.push(figure.scatter({ field: "x" }, { field: `mark${number}` }, { source, marker: mark, size: 9, line_width: strokeOf(number) }));
    return { number, of };
  });
  const middle = figure.line({ field: "x" }, { field: "height" }, { source: pointed, line_alpha: 0 });
  figure.add_tools(new Bokeh.HoverTool({ renderers: [middle], mode: "vline", tooltips: "@tip{safe}", line_policy: "nearest", attachment: "horizontal" }));
  const text = TEXTS[panel.kind];
  const low = Math.min(...present.flatMap(([line]) => line.y.filter((y) => y !== null)), Infinity);
  function show() {
    for (const { number, of } of glyphs) of.forEach((glyph) => { glyph.visible = shown.has(number); });
    const visible = glyphs.filter(({ number }) => shown.has(number));
    const height = panel.top ? panel.top / 2 : low;
    pointed.data = { x, height: x.map(() => height), tip: chart.at.map((at, row) =>
      tipOf(chart.x.ticks?.[row] || TEXTS[chart.x.kind](at), visible.map(({ number }) => {
        const line = panel.lines[number];
        const band = line.low && line.high[row] !== line.low[row] ? ` (${text(line.low[row])}–${text(line.high[row])})` : "";
        return [number, text(line.y[row]) + band];
      }))) };
  }
  return { show, colour: () => recolour(glyphs) };
}

// Draws a marker at the mean of each class, with a line up to the 99th percentile.
function drawClasses(chart, panel, figure) {
  const { classes } = chart.x;
  const rows = panel.lines.map((line, number) => ({ line, number, source: new Bokeh.ColumnDataSource({ data: { x: [], y: [], high: [], tip: [] } }) }));
  const glyphs = rows.map(({ source, number }) => {
    const { mark } = report.policies[number];
    const bar = figure.segment({ field: "x" }, { field: "y" }, { field: "x" }, { field: "high" }, { source, line_width: 2 });
    const cap = figure.scatter({ field: "x" }, { field: "high" }, { source, marker: "dash", size: 10, line_width: 2 });
    const mean = figure.scatter({ field: "x" }, { field: "y" }, { source, marker: mark, size: 11, line_width: strokeOf(number) });
    mean.hover_glyph = null; // otherwise the marker would change its colour
    return { number, of: [bar, cap, mean], mean };
  });
  figure.add_tools(new Bokeh.HoverTool({ renderers: glyphs.map(({ mean }) => mean), mode: "mouse", tooltips: "@tip{safe}" }));
  const highest = Math.max(MINUTE_S, ...panel.lines.flatMap((line) => line.high.filter((high) => high !== null)));
  const ticks = [0, 60, 600, 3600, 21600, 86400, 604800, 2592000].filter((tick) => tick <= highest * 1.6);
  figure.yaxis.ticker = new Bokeh.FixedTicker({ ticks: ticks.map(bent) });
  figure.yaxis.major_label_overrides = new Map(ticks.map((tick) => [bent(tick), tick ? roundDuration(tick) : "0"]));
  figure.xaxis.ticker = new Bokeh.FixedTicker({ ticks: classes.map((_, at) => at) });
  figure.xaxis.major_label_overrides = new Map(classes.map((name, at) => [at, name]));
  Object.assign(figure.y_range, { start: -0.08, end: bent(highest) + 0.15 });
  function show() {
    const numbers = every.filter((number) => shown.has(number));
    for (const { line, number, source } of rows) {
      const place = numbers.indexOf(number);
      const known = place < 0 ? [] : classes.map((_, at) => at).filter((at) => line.y[at] !== null);
      source.data = {
        x: known.map((at) => at + ((place + 0.5) / numbers.length - 0.5) * 0.8),
        y: known.map((at) => bent(line.y[at])),
        high: known.map((at) => bent(line.high[at])),
        tip: known.map((at) => tipOf(`${classes[at]}: ${count(line.jobs[at])} jobs`, [[number, `mean ${duration(line.y[at])}, p99 ${duration(line.high[at])}`]])),
      };
    }
  }
  return { show, colour: () => recolour(glyphs) };
}

function rules(chart, panel, figure) {
  const spans = [];
  if (panel.rule) spans.push(new Bokeh.Span({ location: panel.rule, dimension: "width", line_dash: [2, 3] }));
  if (chart.x.rule) spans.push(new Bokeh.Span({ location: chart.x.rule, dimension: "height" }));
  spans.forEach((span) => figure.add_layout(span));
  return () => spans.forEach((span) => { span.line_color = styleOf("--text"); });
}

// The range of the whole x axis, with margins if there are few points.
function rangeOf({ at, x }) {
  if (x.classes) return new Bokeh.Range1d({ start: -0.5, end: x.classes.length - 0.5 });
  const [start, end] = [at[0], at.at(-1)].map((each) => (x.kind === "date" ? (report.origin_s + each) * 1000 : each));
  const spare = at.length < 20 ? (end - start) * 0.04 : 0;
  return new Bokeh.Range1d({ start: start - spare, end: end + spare });
}

async function drawChart(chart) {
  const place = section(`plot-${chart.id}`);
  const panels = chart.panels;
  const range = rangeOf(chart);
  const parts = [];
  for (const [number, panel] of panels.entries()) {
    const last = number === panels.length - 1;
    const more = { x_range: range, y_range: panel.top ? [0, panel.top * 1.04] : chart.x.classes ? [0, 1] : new Bokeh.DataRange1d({ start: 0, only_visible: true }) };
    const figure = figureOf(chart.x, panel, (panels.length > 1 ? 230 : 330) + (last ? 30 : 0), more);
    const part = chart.x.classes ? drawClasses(chart, panel, figure) : drawLines(chart, panel, figure);
    if (chart.x.ticks) Object.assign(figure.xaxis, {
      ticker: new Bokeh.FixedTicker({ ticks: chart.at }), major_label_overrides: new Map(chart.at.map((at, row) => [at, chart.x.ticks[row]])) });
    const rule = rules(chart, panel, figure);
    figure.xgrid.ticker = chart.x.classes ? new Bokeh.FixedTicker({ ticks: chart.x.classes.map((_, at) => at + 0.5) }) : figure.xaxes[0].ticker;
    figure.ygrid.ticker = figure.yaxes[0].ticker;
    if (last) figure.xaxis.axis_label = chart.x.label || null;
    parts.push({ figure, style() { restyled(figure); part.colour(); rule(); }, show: part.show });
  }
  parts.forEach((part) => { part.style(); part.show(); });
  listeners.theme.push(() => parts.forEach((part) => { part.style(); part.show(); }));
  listeners.shown.push(() => parts.forEach((part) => part.show()));
  const column = new Bokeh.Column({ children: parts.map(({ figure }) => figure), sizing_mode: "stretch_width", spacing: 4 });
  const { child_views } = await Bokeh.Plotting.show(column, place);
  // Repaint at once, because printing does not wait for the browser's next frame.
  listeners.paper.push(() => child_views.forEach((view) => {
    view.renderer_views.forEach((each) => each.set_visuals?.());
    view.repaint();
  }));
  if (chart.at) zoomButtons(chart, range, parts);
}

// Buttons to zoom and move a chart without a mouse.
function zoomButtons(chart, range, parts) {
  const whole = [range.start, range.end];
  const [to, from] = chart.x.log ? [Math.log, Math.exp] : [(value) => value, (value) => value];
  const move = (change) => {
    const [start, end] = change(to(range.start), to(range.end));
    Object.assign(range, { start: from(start), end: from(end) });
  };
  const scale = (factor) => () => move((start, end) => {
    const middle = (start + end) / 2, half = ((end - start) / 2) * factor;
    return [middle - half, middle + half];
  });
  const shift = (share) => () => move((start, end) => [start + share * (end - start), end + share * (end - start)]);
  const reset = () => {
    Object.assign(range, { start: whole[0], end: whole[1] });
    chart.panels.forEach(({ top }, at) => { if (top) Object.assign(parts[at].figure.y_range, { start: 0, end: top * 1.04 }); });
  };
  section(`tools-${chart.id}`).replaceChildren(button("+", "zoom in", scale(0.5)), button("−", "zoom out", scale(2)),
    button("◀", "earlier or less", shift(-0.25)), button("▶", "later or more", shift(0.25)), button("whole", "all of it", reset));
}

// The values of a chart as a table, for readers who cannot see the chart or use a mouse.
function valuesOf(chart) {
  const details = section(`values-${chart.id}`);
  const fill = () => {
    if (!details.open) return;
    const numbers = every.filter((number) => shown.has(number));
    const at = chart.x.classes || chart.at;
    const step = chart.x.classes ? 1 : Math.max(1, Math.floor(at.length / 24));
    const rows = [...at.keys()].filter((row) => row % step === 0 || row === at.length - 1);
    const first = { head: chart.x.label || "time", value: (row) => (chart.x.classes ? row : at[row]), text: (row) => (chart.x.classes || chart.x.ticks || at.map(TEXTS[chart.x.kind]))[row] };
    const columns = chart.panels.flatMap((panel) => {
      const known = numbers.filter((number) => panel.lines[number]);
      const { unit, text } = inOneUnit(panel.kind, known.flatMap((number) => panel.lines[number].y));
      return known.map((number) => ({ head: report.policies[number].label, small: `${panel.label}${unit && `, ${unit}`}`,
        value: (row) => panel.lines[number].y[row], text: (row) => text(panel.lines[number].y[row]) }));
    });
    tableOf(details.lastElementChild, { columns: [first, ...columns], rows, label: `values of ${chart.title}` });
  };
  details.addEventListener("toggle", fill);
  listeners.shown.push(fill);
}
