// A table of one measure by size, tenant, user, …; the user chooses the measure and the classes.
function breakdown() {
  const place = section("breakdown");
  place.closest("section").hidden = !report.breakdowns.length;
  if (!report.breakdowns.length) return;
  const by = select(report.breakdowns.map(({ heading }, at) => [at, heading]));
  const what = select(Object.entries(report.measures).map(([name, [text]]) => [name, text]));
  const filter = element("input", { type: "search", placeholder: "filter", "aria-label": "filter the classes" });
  const said = element("p", { class: "soft" });
  const at = element("div");
  place.replaceChildren(element("div", { class: "controls" }, element("label", {}, "by", by), element("label", {}, "of", what), filter), said, at);
  function fill() {
    const { heading, classes, total, seeds, jobs, values } = report.breakdowns[by.value];
    const [name, kind] = report.measures[what.value];
    const numbers = every.filter((number) => shown.has(number) && values[what.value][number]);
    const { unit, text } = inOneUnit(kind, numbers.flatMap((number) => values[what.value][number]));
    const columns = [
      { head: heading, value: (row) => classes[row], text: (row) => classes[row] },
      { head: "jobs", value: (row) => jobs[row], text: (row) => count(jobs[row]) },
      ...numbers.map((number) => ({ head: report.policies[number].label, value: (row) => values[what.value][number][row], text: (row) => text(values[what.value][number][row]) })),
    ];
    const wanted = filter.value.trim().toLowerCase();
    const rows = [...classes.keys()].filter((row) => classes[row].toLowerCase().includes(wanted));
    said.textContent = `${name} by ${heading}${unit && ` in ${unit}`}, per policy that is shown above${seeds > 1 ? `, over the jobs of ${seeds} seeds together` : ""}.`
      + (total > classes.length ? ` Only the ${count(classes.length)} of ${count(total)} with the most requested work.` : "");
    tableOf(at, { columns, rows, most: 25, label: `${name} by ${heading}` });
  }
  [by, what].forEach((choice) => choice.addEventListener("change", fill));
  filter.addEventListener("input", fill);
  listeners.shown.push(fill);
  fill();
}
