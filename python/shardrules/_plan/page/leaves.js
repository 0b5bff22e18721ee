"use strict";
// The table of leaves: search, sorting, modules. Only what is open is made, a page at a time.

(() => {
  const PAGE = 100;
  const collator = new Intl.Collator("en", { numeric: true });
  const ofLeaf = (value) => (node) => (node.row === null ? "" : value(kindOf(node.row)));

  // How a column is sorted, and what its cells hold, if that is something else.
  const columns = [
    { title: "Path", kind: "path", value: labelShown, cell: pathCell },
    { title: "Leaves", kind: "number", value: (node) => node.leaves, cell: (node) => counted(node.leaves) },
    { title: "Shape", kind: "shape", value: ofLeaf((kind) => kind.shape) },
    { title: "Dtype", value: ofLeaf((kind) => kind.dtype) },
    { title: "Spec", kind: "spec", cell: specCell,
      value: (node) => (node.spec === null ? "" : report.specs[node.spec].text) },
    { title: "Rule", value: ofLeaf((kind) => kind.rule), cell: ofLeaf((kind) => kind.rule.replace("rule ", "")) },
    { title: "Corrections", value: ofLeaf((kind) => kind.notes.join("; ")) },
    { title: "Bytes", kind: "number", value: (node) => node.bytes, cell: (node) => bytesShown(node.bytes) },
    { title: "Per device", kind: "number", value: (node) => node.held, cell: (node) => bytesShown(node.held) },
  ];

  const state = {
    text: "", grouped: true, column: columns.length - 1, descending: true,
    toggled: new Map(), pages: new Map(),
  };
  const body = element("tbody");
  const headings = columns.map((column, i) =>
    element("th", { scope: "col", class: column.kind ?? null },
      element("button", { type: "button", onclick: () => sortBy(i) }, column.title)));
  const searchBox = document.getElementById("search");

  // Numbers in the search meet sets that contain them: layers/7/ finds layers/{0..60}/.
  function matcher(text) {
    if (!text) return () => true;
    const numbers = text.match(/\d+/g) ?? [];
    const literal = text.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&");
    const folded = new RegExp(literal.replace(/\d+/g, "(\\d+|\\{[\\d.,]+\\})"));
    const kinds = report.kinds.map((kind) => kindText(kind).includes(text));
    return (row) => {
      if (kinds[report.rows.kinds[row]]) return true;
      const pattern = patternOf(row).toLowerCase();
      if (pattern.includes(text)) return true;
      const found = numbers.length && cutsOf.has(row) ? folded.exec(pattern) : null;
      return found !== null && numbers.every((number, i) => contains(found[i + 1], number));
    };
  }

  // Whether a set as {0,2..5} has a number, which may be larger than a browser's own.
  const contains = (shown, number) => (!shown.startsWith("{") ? shown === number
    : shown.slice(1, -1).split(",").some((run) => {
      const [first, last = first] = run.split("..").map(BigInt);
      return first <= BigInt(number) && BigInt(number) <= last;
    }));

  // What is searched beside the path.
  function kindText(kind) {
    const { text, replicated } = report.specs[kind.spec];
    return [text, replicated ? "replicated" : "", kind.rule, kind.dtype, kind.problem ?? "", ...kind.notes]
      .join("\n").toLowerCase();
  }

  function pathCell(node) {
    const pattern = node.row === null ? keyOf(node) : patternOf(node.row);
    const label = element("code", { title: pattern }, state.grouped ? labelShown(node) : pattern);
    if (node.row !== null) return [element("span", { class: "no-toggle" }), label];
    const open = isOpen(node);
    return element("button", {
      type: "button", class: "toggle", "aria-expanded": String(open), "data-key": keyOf(node),
      onclick: () => { state.toggled.set(keyOf(node), !isOpen(node)); render(); },
    }, element("span", { class: "arrow", "aria-hidden": "true" }, open ? "▾" : "▸"), label);
  }

  function specCell(node) {
    const kind = node.row === null ? null : kindOf(node.row);
    if (kind?.problem) return element("span", { class: "problem" }, kind.problem);
    if (node.spec === null) return element("span", { class: "hint" }, "several");
    return [swatch(classOf[node.spec].colour), element("code", {}, report.specs[node.spec].text)];
  }

  let areFew = false;
  const isOpen = (node) => state.toggled.get(keyOf(node)) ?? areFew;

  function ordered(nodes) {
    const { value } = columns[state.column];
    const sign = state.descending ? -1 : 1;
    return [...nodes].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      return sign * (typeof x === "string" ? collator.compare(x, y) : x - y);
    });
  }

  function appendNodes(lines, nodes, parent, level) {
    const limit = state.pages.get(parent) ?? PAGE;
    for (const node of ordered(nodes).slice(0, limit)) {
      lines.push(line(node, level));
      if (node.row === null && isOpen(node)) appendNodes(lines, childrenOf(node), keyOf(node), level + 1);
    }
    if (nodes.length > limit) lines.push(moreLine(parent, limit, nodes.length));
  }

  function line(node, level) {
    const cells = columns.map(({ kind, value, cell = value }) => element("td", { class: kind ?? null }, cell(node)));
    cells[0].style.setProperty("--level", level);
    const kind = node.row === null ? null : kindOf(node.row);
    const classes = [kind ? "leaf" : "module", kind?.large ? "large" : null, kind?.problem ? "broken" : null];
    return element("tr", { class: classes.filter((name) => name !== null).join(" ") }, cells);
  }

  function moreLine(key, limit, count) {
    const button = element("button", {
      type: "button", class: "more", "data-key": `more ${key}`,
      onclick: () => { state.pages.set(key, 2 * limit); render(); },
    }, `Show more: ${counted(limit)} of ${counted(count)} are shown`);
    return element("tr", { class: "rest" }, element("td", { colspan: columns.length }, button));
  }

  function sortBy(column) {
    state.descending = state.column === column ? !state.descending : columns[column].kind === "number";
    state.column = column;
    render();
  }

  function render() {
    const rows = state.text ? allRows.filter(matcher(state.text)) : allRows;
    const lines = [];
    if (state.grouped && rows.length) {
      const tree = state.text ? treeOf(rows) : wholeTree;
      areFew = rows.length <= PAGE;
      appendNodes(lines, childrenOf(tree), "", 0);
    } else {
      appendNodes(lines, rows.map((row) => leafNode(row, 0)), "", 0);
    }
    // What has the focus is made anew.
    const focused = document.activeElement?.dataset?.key;
    body.replaceChildren(...lines);
    if (focused !== undefined) body.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
    headings.forEach((heading, i) => heading.setAttribute("aria-sort",
      i !== state.column ? "none" : state.descending ? "descending" : "ascending"));
    const leaves = rows.reduce((total, row) => total + leavesOf(row), 0);
    document.getElementById("count").textContent =
      `${leavesShown(leaves)} in ${counted(rows.length)} folded ${rows.length === 1 ? "row" : "rows"}`;
  }

  function search(text) {
    Object.assign(state, { text: text.toLowerCase(), toggled: new Map(), pages: new Map() });
    render();
  }

  let pause = 0;
  searchBox.addEventListener("input", () => {
    clearTimeout(pause);
    pause = setTimeout(search, 120, searchBox.value);
  });
  document.getElementById("grouped").addEventListener("change", (event) => {
    state.grouped = event.target.checked;
    render();
  });
  document.getElementById("leaf-table").append(
    element("thead", {}, element("tr", {}, headings)), body);

  // A spec of the legend is a search for it.
  document.getElementById("legend").append(...specClasses.map(({ label, colour, held }) =>
    element("button", {
      type: "button", disabled: label === "other specs",
      onclick: () => {
        searchBox.value = label;
        search(label);
        document.getElementById("leaves").scrollIntoView();
      },
    }, swatch(colour), element("code", {}, label),
    element("span", { class: "hint" }, bytesShown(held)))));

  render();
})();
