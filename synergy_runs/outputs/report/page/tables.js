// Makes the tables in the page sortable by any column, and builds further sortable tables.
const numberIn = (text) => parseFloat(text.replace(/[,\s]/g, "").replace("−", "-"));

function ordered(rows, value, descending) {
  const sign = descending ? -1 : 1;
  const none = (each) => each === null || each === undefined || Number.isNaN(each);
  return rows.map((row) => [value(row), row]).sort(([one], [other]) => {
    if (none(one) || none(other)) return none(one) - none(other); // unknown values come last
    return sign * (typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other);
  }).map(([, row]) => row);
}

// Says above a table how many of its columns are beyond the box, as long as it is wider than the box.
function saysWhatIsBeyond(box) {
  const said = element("p", { class: "more", hidden: true });
  box.before(said);
  const say = () => {
    const heads = [...(box.querySelector("tr")?.cells || [])], end = box.scrollLeft + box.clientWidth + 1;
    const beyond = heads.filter((head) => head.offsetLeft + head.offsetWidth > end).length;
    const whole = box.scrollWidth <= box.clientWidth + 1;
    said.hidden = whole;
    said.textContent = beyond ? `${count(beyond)} of ${count(heads.length)} columns are further right: scroll the table sideways. →` : "← The first columns are further left.";
  };
  new ResizeObserver(say).observe(box.firstElementChild);
  new ResizeObserver(say).observe(box);
  box.addEventListener("scroll", say, { passive: true });
}

// Turns each head into a button that calls `sort(column, descending)`.
function sortingHeads(heads, sort, start = {}) {
  heads.forEach((head, column) => {
    if (!head.textContent.trim()) return;
    const button = element("button", { type: "button", title: "sort by this column" });
    button.append(...head.childNodes);
    head.replaceChildren(button);
    if (start.column === column) head.setAttribute("aria-sort", start.descending ? "descending" : "ascending");
    button.addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      sort(column, descending);
    });
  });
}

function sortable(table) {
  const body = table.tBodies[0];
  sortingHeads([...table.tHead.rows[0].cells], (column, descending) => {
    body.querySelectorAll("tr.title").forEach((row) => row.remove()); // sorting mixes the groups, so their titles go
    const texts = [...body.rows].map((row) => row.cells[column].textContent.trim());
    const numeric = texts.some((text) => !Number.isNaN(numberIn(text))) && texts.every((text) => text === "–" || !Number.isNaN(numberIn(text)));
    const value = (row) => {
      const text = row.cells[column].textContent.trim();
      return numeric ? numberIn(text) : text;
    };
    body.append(...ordered([...body.rows], value, descending));
  });
}

// A table of `rows` by `columns` ({head, small, value, text, kind}), in pages of `most` rows. open: called with the row
// whose first cell is clicked.
function tableOf(place, { columns, rows, most = 50, sort = null, label = "", open = null }) {
  let state = sort, all = rows, page = 0;
  const table = element("table", { "aria-label": label });
  const where = element("span", { class: "soft", "aria-live": "polite" });
  const turn = (step) => { page += step; fill(); };
  const back = element("button", { type: "button", onclick: () => turn(-1) }, "previous");
  const next = element("button", { type: "button", onclick: () => turn(1) }, "next");
  const pager = element("div", { class: "pager" }, back, next, where);
  const heads = columns.map((column) => element("th", { scope: "col", class: column.kind || null }, column.head, ...(column.small !== undefined ? [element("small", {}, column.small)] : [])));
  const body = element("tbody");
  table.append(element("thead", {}, element("tr", {}, ...heads)), body);
  function fill() {
    body.replaceChildren(...all.slice(page * most, (page + 1) * most).map((row) => element("tr", {}, ...columns.map((column, number) =>
      number === 0 ? element("th", { scope: "row", title: column.text(row) }, open ? element("button", { type: "button", class: "link", onclick: () => open(row) }, column.text(row)) : column.text(row)) : element("td", { class: column.kind || null }, column.text(row))))));
    back.disabled = page === 0;
    next.disabled = (page + 1) * most >= all.length;
    pager.hidden = all.length <= most;
    where.textContent = all.length ? `${count(page * most + 1)}–${count(Math.min(all.length, (page + 1) * most))} of ${count(all.length)}` : "none";
  }
  function order() {
    page = 0;
    if (state) all = ordered(all, columns[state.column].value, state.descending);
    fill();
  }
  sortingHeads(heads, (column, descending) => { state = { column, descending }; order(); }, sort || {});
  const box = element("div", { class: "wide", tabindex: 0 }, table);
  place.replaceChildren(box, pager);
  saysWhatIsBeyond(box);
  order();
  return {
    keep(found) { all = found; order(); return all.length; },
    sorted: () => state,
  };
}
