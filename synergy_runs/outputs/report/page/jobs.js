// The list of jobs under one policy, which can be searched and sorted.
let jobsRead = null;

function readJobs() {
  jobsRead ||= (async () => {
    const [{ about, columns }, names] = await Promise.all([unpackedColumns("jobs"), unpackedText("job-names")]);
    const name = names.split("\n");
    const submitted = summed(columns.submitted_after_last);
    const rowOf = new Map([...columns.id].map((id, row) => [id, row]));
    const times = (values) => values.map((value) => (value < 0 ? NaN : value * about.unit_s));
    const read = { about, name, columns, rowOf, submitted: times(submitted), duration: times(columns.duration), limit: times(columns.limit || []), fared: {} };
    for (const number of about.policies) {
      const waiting = times(columns[`waiting${number}`]);
      const jct = waiting.map((wait, row) => {
        const folded = columns[`over${number}`][row];
        return folded < 0 ? NaN : wait + read.duration[row] + (folded % 2 ? -(folded + 1) / 2 : folded / 2) * about.unit_s;
      });
      read.fared[number] = { waiting, jct, preemptions: columns[`preemptions${number}`] };
    }
    return read;
  })();
  return jobsRead;
}

async function jobList() {
  const place = section("job-list");
  const read = await readJobs();
  const { about, name, columns } = read;
  const policy = select(about.policies.map((number) => [number, report.policies[number].label]));
  const search = element("input", { type: "search", placeholder: "job, user, tenant, …", "aria-label": "search the jobs" });
  const least = element("input", { type: "number", min: 0, placeholder: "any", style: "width:5.5rem" });
  const said = element("span", { class: "soft", "aria-live": "polite" });
  const at = element("div");
  place.replaceChildren(element("div", { class: "controls" }, element("label", {}, "under", policy), search,
    element("label", {}, `${report.units[1]} at least`, least), said), at);
  const words = { user: "user", virtual_cluster: "tenant", gpu_type: "asked type", model: "model", end_state: "end" };
  const named = Object.keys(about.names).map((key) => {
    const text = (row) => about.names[key][columns[key][row]];
    return { head: words[key], kind: "text", value: text, text };
  });
  const texts = name.map((each, row) => [each, ...named.map((column) => column.text(row))].join(" ").toLowerCase());
  const limited = "limit" in columns;
  const sort = { column: named.length + (limited ? 5 : 4), descending: true }; // by waiting
  let table;
  const found = () => {
    const parts = search.value.toLowerCase().split(/\s+/).filter(Boolean), gpus = Number(least.value) || 0;
    const rows = [...name.keys()].filter((row) => columns.gpus[row] >= gpus && parts.every((part) => texts[row].includes(part)));
    const partial = rows.filter((row) => columns.partial[row]).length;
    said.textContent = `${count(rows.length - partial)} of ${count(about.jobs)} jobs${partial ? `, and ${count(partial)} that ran when the window began or when the log was written` : ""}`
      + (about.left_out ? `; listed are the ${count(name.length)} that waited longest under any policy` : "");
    return rows;
  };
  function fill() {
    const { waiting, jct, preemptions } = read.fared[policy.value];
    const time = (head, small, values) => {
      const { unit, text } = inOneUnit("duration", values);
      return { head, small: [small, unit].filter(Boolean).join(", "), value: (row) => values[row], text: (row) => text(values[row]) };
    };
    const slowdown = (row) => (read.duration[row] > 0 ? jct[row] / read.duration[row] : NaN);
    const start = table && table.sorted();
    const open = async (row) => {
      await showJob(row);
      section("one-job").scrollIntoView({ block: "start" });
      section("one-job").querySelector("h3").focus({ preventScroll: true });
    };
    table = tableOf(at, { rows: found(), sort: start || sort, label: "jobs", open, columns: [
      { head: "job", value: (row) => name[row], text: (row) => name[row] },
      ...named,
      { head: report.units[1], value: (row) => columns.gpus[row], text: (row) => count(columns.gpus[row]) },
      { head: "submitted", small: "UTC", value: (row) => read.submitted[row], text: (row) => clock(read.submitted[row]) },
      time("run time", "on GPUs asked for", read.duration),
      ...(limited ? [time("time limit", "user estimate", read.limit)] : []),
      time("waited", "in all", waiting),
      time("JCT", "", jct),
      { head: "slowdown", small: "JCT ÷ run time", value: slowdown, text: (row) => threeDigits(slowdown(row)) },
      { head: "preempted", small: "times", value: (row) => preemptions[row], text: (row) => count(preemptions[row]) },
    ] });
  }
  policy.addEventListener("change", fill);
  [search, least].forEach((input) => input.addEventListener("input", () => table.keep(found())));
  fill();
  const longest = (row) => Math.max(...about.policies.map((number) => read.fared[number].waiting[row] || 0));
  if (name.length) await showJob([...name.keys()].reduce((most, row) => (longest(row) > longest(most) ? row : most)));
}
