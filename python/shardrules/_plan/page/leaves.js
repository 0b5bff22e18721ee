"use strict";
// The table of leaves: search, sorting, folding. Only what is open is made, a page at a time.

(() => {
  const PAGE = 100;
  // How many rows modules are opened for, the upper ones first.
  const ROWS = { none: 0, some: 40, all: 2000 };
  const collator = new Intl.Collator("en", { numeric: true });
  const ofLeaf = (value, otherwise = "") => (node) =>
    (node.row === null ? otherwise : value(kindOf(node.row)));

  // How a column is sorted, and what its cells hold.
  const columns = [
    { title: "Path", kind: "path", value: labelShown, cell: pathCell },
    { title: "Leaves", kind: "number", value: (n) => n.leaves, cell: (n) => counted(n.leaves) },
    { title: "Shape", kind: "shape",
      value: ofLeaf((k) => (k.shape ?? []).reduce((a, b) => a * b, 1), -1),
      cell: ofLeaf((k) => shapeShown(k.shape)) },
    { title: "Dtype", value: ofLeaf((k) => k.dtype), cell: ofLeaf((k) => k.dtype) },
    { title: "Spec", kind: "spec",
      value: (n) => (n.spec === null ? "" : report.specs[n.spec].text), cell: specCell },
    { title: "Rule", kind: "number", value: ofLeaf((k) => k.rule ?? -1, -2),
      cell: ofLeaf((k) => k.decided) },
    { title: "Corrections", value: (n) => n.lost, cell: correctionCell },
    { title: "Bytes", kind: "number", value: (n) => n.bytes, cell: (n) => bytesShown(n.bytes) },
    { title: "Per device", kind: "number", value: (n) => n.held, cell: (n) => bytesShown(n.held) },
  ];

  const state = {
    text: "", grouped: true, column: columns.length - 1, descending: true,
    unfolded: "some", // a key of ROWS; but `toggled` has the last word
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
    const kinds = kindTexts().map((one) => one.includes(text));
    return (row) => {
      if (kinds[report.rows.kinds[row]]) return true;
      const pattern = patternOf(row).toLowerCase();
      if (pattern.includes(text)) return true;
      const found = numbers.length && cutsOf.has(row) ? folded.exec(pattern) : null;
      return found !== null && numbers.every((number, i) => contains(found[i + 1], number));
    };
  }
  // No set has numbers of more digits.
  const contains = (shown, number) => (shown.startsWith("{") && number.length <= 18
    ? runsOf(shown).some(([first, length]) => {
      const index = BigInt(number) - first;
      return 0n <= index && index < BigInt(length);
    })
    : shown === number);

  // What is searched beside the path, per kind.
  const kindTexts = () => report.kinds.map((kind) => {
    const rule = kind.rule === null ? namesOf(kind) : `rule ${kind.rule} ${report.rules[kind.rule].pattern}`;
    const { text, replicated } = report.specs[kind.spec];
    return [text, replicated ? "replicated" : "", rule, kind.dtype, kind.problem ?? "", ...kind.notes]
      .join("\n").toLowerCase();
  });

  function pathCell(node) {
    const pattern = node.row === null ? keyOf(node) : patternOf(node.row);
    const label = element("code", { title: pattern }, state.grouped ? labelShown(node) : pattern);
    const opens = node.row === null || partsOf(node.row).length > 1;
    if (!opens) return [element("span", { class: "no-toggle" }), label];
    const open = isOpen(node);
    return element("button", {
      type: "button", class: "toggle", "aria-expanded": String(open), "data-key": keyOf(node),
      onclick: () => toggle(node),
    }, element("span", { class: "arrow", "aria-hidden": "true" }, open ? "▾" : "▸"), label);
  }

  function specCell(node) {
    const kind = node.row === null ? null : kindOf(node.row);
    if (kind?.problem) return element("span", { class: "problem" }, kind.problem);
    if (node.spec === null) return element("span", { class: "hint" }, "several");
    return [swatch(classOf[node.spec].colour), element("code", {}, report.specs[node.spec].text),
      kind?.large ? element("span", { class: "badge" }, "replicated") : null];
  }

  function correctionCell(node) {
    if (node.row === null) return node.lost ? leavesShown(node.lost) : "";
    const { origin, notes } = kindOf(node.row);
    return [origin, ...notes].filter((note) => note !== null).join("; ");
  }

  let unfolded = new Set();
  const isOpen = (node) => state.toggled.get(keyOf(node)) ?? unfolded.has(keyOf(node));

  // The keys of the modules that these rows have room for, level by level.
  function unfoldedKeys(tree, rows) {
    const keys = new Set();
    let room = rows - childrenOf(tree).length;
    let level = [tree];
    while (level.length && room >= 0) {
      level = level.flatMap((node) => childrenOf(node).filter((child) => child.row === null));
      for (const node of level.sort((a, b) => b.held - a.held)) {
        room -= Math.min(PAGE, childrenOf(node).length);
        if (room < 0) return keys;
        keys.add(keyOf(node));
      }
    }
    return keys;
  }

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
      if (!isOpen(node)) continue;
      if (node.row === null) appendNodes(lines, childrenOf(node), keyOf(node), level + 1);
      else appendSingles(lines, node, level + 1);
    }
    if (nodes.length > limit) lines.push(moreLine(parent, limit, nodes.length, level));
  }

  function appendSingles(lines, node, level) {
    const key = keyOf(node);
    const limit = state.pages.get(key) ?? PAGE;
    const { count, paths } = singlePaths(node.row, state.text, limit);
    for (const path of paths)
      lines.push(wideLine("single", level, element("code", {}, path)));
    if (count > limit) lines.push(moreLine(key, limit, count, level));
  }

  function line(node, level) {
    const cells = columns.map((column) =>
      element("td", { class: column.kind ?? null }, column.cell(node)));
    cells[0].style.setProperty("--level", level);
    const kind = node.row === null ? null : kindOf(node.row);
    const kinds = [kind ? "leaf" : "module", kind?.large ? "large" : null,
      kind?.problem ? "broken" : null];
    return element("tr", { class: kinds.filter((one) => one !== null).join(" ") }, cells);
  }

  function wideLine(kind, level, content) {
    const cell = element("td", { class: "path", colspan: columns.length }, content);
    cell.style.setProperty("--level", level);
    return element("tr", { class: kind }, cell);
  }

  function moreLine(key, limit, count, level) {
    const button = element("button", {
      type: "button", class: "more", "data-key": `more ${key}`,
      onclick: () => { state.pages.set(key, 2 * limit); render(); },
    }, `Show more: ${counted(limit)} of ${counted(count)} are shown`);
    return wideLine("rest", level, button);
  }

  function toggle(node) {
    state.toggled.set(keyOf(node), !isOpen(node));
    render();
  }

  function sortBy(column) {
    state.descending = state.column === column ? !state.descending : columns[column].kind === "number";
    state.column = column;
    render();
  }

  function unfold(much) {
    state.unfolded = much;
    state.toggled.clear();
    render();
  }

  function render() {
    const rows = state.text ? allRows.filter(matcher(state.text)) : allRows;
    const lines = [];
    if (state.grouped && rows.length) {
      const tree = state.text ? treeOf(rows) : wholeTree;
      unfolded = unfoldedKeys(tree, ROWS[state.unfolded]);
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
      `${counted(leaves)} of ${leavesShown(report.leaves)}, in ${counted(rows.length)} folded ` +
      (rows.length === 1 ? "row" : "rows");
  }

  function search(text) {
    state.text = text.toLowerCase();
    state.unfolded = "some";
    state.toggled.clear();
    state.pages.clear();
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
  document.getElementById("expand").addEventListener("click", () => unfold("all"));
  document.getElementById("collapse").addEventListener("click", () => unfold("none"));
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
