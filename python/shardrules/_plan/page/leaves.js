"use strict";
// The table of leaves: search and sorting. The first rows alone are made.

(() => {
  const MOST = 500;
  const collator = new Intl.Collator("en", { numeric: true });

  // How a column is sorted, and what its cells hold, if that is something else.
  const columns = [
    { title: "Path", kind: "path", value: (row) => row.pattern, cell: (row) => element("code", {}, row.pattern) },
    { title: "Leaves", kind: "number", value: (row) => row.leaves, cell: (row) => counted(row.leaves) },
    { title: "Shape", kind: "shape", value: (row) => row.shape },
    { title: "Dtype", value: (row) => row.dtype },
    { title: "Spec", kind: "spec", value: (row) => report.specs[row.spec].text, cell: specCell },
    { title: "Rule", value: (row) => row.rule, cell: (row) => row.rule.replace("rule ", "") },
    { title: "Corrections", value: (row) => row.notes.join("; ") },
    { title: "Bytes", kind: "number", value: (row) => row.leaves * row.bytes, cell: (row) => bytesShown(row.leaves * row.bytes) },
    { title: "Per device", kind: "number", value: (row) => row.leaves * row.held, cell: (row) => bytesShown(row.leaves * row.held) },
  ];
  let sortedBy = columns.length - 1;
  let isDescending = true;
  const body = element("tbody");
  const headings = columns.map(({ title, kind }, i) =>
    element("th", { scope: "col", class: kind ?? null },
      element("button", { type: "button", onclick: () => sortBy(i) }, title)));
  const searchBox = document.getElementById("search");

  function specCell({ spec, problem }) {
    if (problem) return element("span", { class: "problem" }, problem);
    return [swatch(classOf[spec].colour), element("code", {}, report.specs[spec].text)];
  }

  // Numbers in the search meet sets that contain them: layers/7/ finds layers/{0..60}/.
  function matcher(text) {
    const numbers = text.match(/\d+/g) ?? [];
    const literal = text.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&");
    const folded = new RegExp(literal.replace(/\d+/g, "(\\d+|\\{[\\d.,]+\\})"));
    return (row) => {
      if (textOf(row).includes(text)) return true;
      const found = numbers.length ? folded.exec(row.pattern.toLowerCase()) : null;
      return found !== null && numbers.every((number, i) => contains(found[i + 1], number));
    };
  }

  function textOf({ pattern, spec, rule, dtype, problem, notes }) {
    const { text, replicated } = report.specs[spec];
    return [pattern, text, replicated ? "replicated" : "", rule, dtype, problem ?? "", ...notes]
      .join("\n").toLowerCase();
  }

  // Whether a set as {0,2..5} has a number, which may be larger than a browser's own.
  const contains = (shown, number) => (!shown.startsWith("{") ? shown === number
    : shown.slice(1, -1).split(",").some((run) => {
      const [first, last = first] = run.split("..").map(BigInt);
      return first <= BigInt(number) && BigInt(number) <= last;
    }));

  function sortBy(column) {
    isDescending = sortedBy === column ? !isDescending : columns[column].kind === "number";
    sortedBy = column;
    render();
  }

  function line(row) {
    const cells = columns.map(({ kind, value, cell = value }) => element("td", { class: kind ?? null }, cell(row)));
    return element("tr", { class: row.problem ? "broken" : row.large ? "large" : null }, cells);
  }

  function render() {
    const text = searchBox.value.toLowerCase();
    const rows = text ? allRows.filter(matcher(text)) : [...allRows];
    const { value } = columns[sortedBy];
    const sign = isDescending ? -1 : 1;
    rows.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      return sign * (typeof x === "string" ? collator.compare(x, y) : x - y);
    });
    body.replaceChildren(...rows.slice(0, MOST).map(line));
    headings.forEach((heading, i) => heading.setAttribute("aria-sort",
      i !== sortedBy ? "none" : isDescending ? "descending" : "ascending"));
    const leaves = rows.reduce((total, row) => total + row.leaves, 0);
    document.getElementById("count").textContent =
      `${leavesShown(leaves)} in ${counted(rows.length)} folded ${rows.length === 1 ? "row" : "rows"}`
      + (rows.length > MOST ? `, of which ${counted(MOST)} are shown` : "");
  }

  let pause = 0;
  searchBox.addEventListener("input", () => {
    clearTimeout(pause);
    pause = setTimeout(render, 120);
  });
  document.getElementById("leaf-table").append(
    element("thead", {}, element("tr", {}, headings)), body);

  // A spec of the legend is a search for it.
  document.getElementById("legend").append(...specClasses.map(({ label, colour, held }) =>
    element("button", {
      type: "button", disabled: label === "other specs",
      onclick: () => {
        searchBox.value = label;
        render();
        document.getElementById("leaves").scrollIntoView();
      },
    }, swatch(colour), element("code", {}, label),
    element("span", { class: "hint" }, bytesShown(held)))));

  render();
})();
