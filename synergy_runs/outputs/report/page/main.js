// Builds the page when it opens: first what a reader sees first, the rest when the browser is idle.
function loadBokeh(text) {
  const script = document.createElement("script");
  script.textContent = text;
  document.head.append(script);
  Bokeh.set_log_level("warn");
}

const idle = () => new Promise((resolve) => (window.requestIdleCallback || setTimeout)(resolve, { timeout: 300 }));

async function open() {
  document.documentElement.classList.add("scripted");
  policyBar();
  themeSwitch();
  document.querySelectorAll("table.sorts").forEach(sortable);
  document.querySelectorAll(".wide").forEach(saysWhatIsBeyond);
  breakdown();
  report.charts.forEach(valuesOf);
  loadBokeh(await unpackedText("bokeh"));
  const [first, ...others] = report.charts;
  await drawChart(first);
  document.documentElement.dataset.open = String(Math.round(performance.now()));
  if (report.gantt.length) await gantt();
  await idle();
  await jobList();
  for (const chart of others) {
    await idle();
    await drawChart(chart);
  }
  document.documentElement.dataset.whole = String(Math.round(performance.now()));
}

await open();
