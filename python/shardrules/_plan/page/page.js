"use strict";
// The table of leaves, and the treemap of what modules hold. Names reach the page as text nodes and
// attributes only, never as markup.

const report = JSON.parse(document.getElementById("data").textContent);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null));
  return made;
}

const counted = (count) => count.toLocaleString("en-US");

const leavesShown = (count) => `${counted(count)} ${count === 1 ? "leaf" : "leaves"}`;

// In powers of 1000, as `bytes_shown` has it.
function bytesShown(count) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];
  let unit = 0;
  while (count >= 999.5 && unit < units.length - 1) {
    count /= 1000;
    unit += 1;
  }
  const digits = unit === 0 ? 0 : Math.max(0, 3 - String(Math.floor(count)).length);
  return `${count.toFixed(digits)} ${units[unit]}`;
}

// A row is a pattern of paths, the number of its leaves, and what one of them is.
const allRows = report.rows.map(([pattern, kind, leaves]) => ({ pattern, leaves, ...report.kinds[kind] }));

// Okabe and Ito's colours, told apart by colour-blind eyes, then three of Tol's. Vermilion is kept
// for what is replicated.
const REPLICATED = "#d55e00";
const NO_SPEC = "#444444";
const OTHERS = "#999999";
const PALETTE = ["#0072b2", "#56b4e9", "#009e73", "#e69f00", "#cc79a7", "#f0e442", "#332288",
  "#999933", "#882255"];

// Of each class of specs its colour, label and bytes; `classOf` has that of each spec.
const [specClasses, classOf] = (() => {
  const held = report.specs.map(() => 0);
  for (const row of allRows) held[row.spec] += row.leaves * row.held;
  const classes = new Map();
  const classOf = [];
  const bySize = report.specs.map((_, i) => i).sort((a, b) => held[b] - held[a]);
  let next = 0;
  for (const i of bySize) {
    const { text, replicated } = report.specs[i];
    let [label, colour] = [text, PALETTE[next]];
    if (replicated) [label, colour] = ["replicated", REPLICATED];
    else if (text === "-") [label, colour] = ["no spec", NO_SPEC];
    else if (next === PALETTE.length) [label, colour] = ["other specs", OTHERS];
    else next += 1;
    if (!classes.has(colour)) classes.set(colour, { label, colour, held: 0 });
    classOf[i] = classes.get(colour);
    classOf[i].held += held[i];
  }
  return [[...classes.values()].sort((a, b) => b.held - a.held), classOf];
})();

const swatch = (colour) => {
  const made = element("span", { class: "swatch", "aria-hidden": "true" });
  made.style.backgroundColor = colour;
  return made;
};

// The table of leaves: search and sorting. The first rows alone are made.

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

// The treemap: boxes whose places and colours are set by script.

// Modules are told apart as deep as this; what is below them keeps its separators.
const DEEPEST = 50;
// Before a separator of any dialect that is in no set of numbers, as {0..3} is.
const CUT = /(?=[/.[])(?![^{}]*\})/u;

const newNode = (path, label, row = null) =>
  ({ path, label, row, children: new Map(), leaves: 0, bytes: 0, held: 0 });

// The tree of modules. A leaf has a row; two rows may have one pattern.
function treeOf(rows) {
  const root = newNode("", "");
  for (const row of rows) {
    const parts = row.pattern.split(CUT);
    if (parts.length > DEEPEST) parts.splice(DEEPEST - 1, parts.length, parts.slice(DEEPEST - 1).join(""));
    const path = [root];
    let node = root;
    for (const part of parts.slice(0, -1)) {
      if (!node.children.has(part)) node.children.set(part, newNode(node.path + part, part));
      node = node.children.get(part);
      path.push(node);
    }
    const leaf = newNode(row.pattern, parts.at(-1), row);
    node.children.set(leaf, leaf);
    for (const each of [...path, leaf]) {
      each.leaves += row.leaves;
      each.bytes += row.leaves * row.bytes;
      each.held += row.leaves * row.held;
    }
  }
  return root;
}

// A module with a single child is shown as one with it.
function childrenOf(node) {
  return [...node.children.values()].map((child) => {
    let [only, label] = [child, child.label];
    while (only.children.size === 1) {
      [only] = only.children.values();
      label += only.label;
    }
    return only === child ? child : { ...only, label };
  });
}

// Without the separator that it begins with, unless nothing else is left.
const labelShown = ({ label }) => label.replace(/^[/.](?=.)/su, "");

const place = document.getElementById("treemap");
const tip = document.getElementById("tip");
// Children smaller than this part of what is shown cannot be seen, and are put together.
const SMALLEST = 1 / 2000;
// Heights and widths in pixels.
const HEAD = 20;
const GAP = 2;
const LEAST = 8; // of a box with children in it
const shown = new WeakMap();

// The rows of a treemap, each as square as can be: M. Bruls, K. Huizing and J. J. van Wijk,
// Squarified Treemaps, 2000. `sizes` are areas, the largest first.
function squarified(sizes, { x, y, width, height }) {
  const boxes = [];
  let begin = 0;
  while (begin < sizes.length) {
    const side = Math.max(Math.min(width, height), 1e-6);
    const worst = (end, sum) =>
      Math.max((side ** 2 * sizes[begin]) / sum ** 2, sum ** 2 / (side ** 2 * sizes[end - 1]));
    let end = begin + 1;
    let sum = sizes[begin];
    while (end < sizes.length && worst(end + 1, sum + sizes[end]) <= worst(end, sum)) {
      sum += sizes[end];
      end += 1;
    }
    const depth = sum / side;
    let along = 0;
    for (; begin < end; begin += 1) {
      const length = sizes[begin] / depth;
      boxes.push(width >= height
        ? { x, y: y + along, width: depth, height: length }
        : { x: x + along, y, width: length, height: depth });
      along += length;
    }
    if (width >= height) [x, width] = [x + depth, width - depth];
    else [y, height] = [y + depth, height - depth];
  }
  return boxes;
}

// Black or white, whichever is told from the colour more easily.
function inkOn(colour) {
  const [red, green, blue] = [1, 3, 5].map((i) => (parseInt(colour.slice(i, i + 2), 16) / 255) ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000000" : "#ffffff";
}

function box(kind, { x, y, width, height }, about, ...lines) {
  const made = element("div", { class: `slice ${kind}` }, lines.map((line) => element("span", {}, line)));
  Object.assign(made.style, {
    left: `${x}px`, top: `${y}px`, width: `${Math.max(1, width - GAP)}px`,
    height: `${Math.max(1, height - GAP)}px`,
  });
  shown.set(made, about);
  return made;
}

function leafBox(node, area) {
  const { text } = report.specs[node.row.spec];
  const made = box("leaf", area, { node, lines: () => hoverLines(node) },
    labelShown(node), bytesShown(node.held), text);
  made.style.backgroundColor = classOf[node.row.spec].colour;
  made.style.color = inkOn(classOf[node.row.spec].colour);
  return made;
}

function moduleBox(node, area, label) {
  const made = box("module", area, { node, lines: () => hoverLines(node) },
    `${label}  ${bytesShown(node.held)}`);
  const inside = {
    x: GAP, y: HEAD, width: area.width - 3 * GAP, height: area.height - HEAD - 2 * GAP,
  };
  if (Math.min(inside.width, inside.height) >= LEAST) made.append(...childBoxes(node, inside));
  return made;
}

function childBoxes(node, area) {
  const least = SMALLEST * trail.at(-1).held;
  const children = childrenOf(node);
  const seen = children.filter((child) => child.held >= least).sort((a, b) => b.held - a.held);
  const held = seen.map((child) => child.held);
  const rest = node.held - held.reduce((total, one) => total + one, 0);
  const unseen = children.length - seen.length;
  if (rest > 0 && unseen > 0) held.push(rest);
  const scale = (area.width * area.height) / node.held;
  // What is put together may be larger than what is seen.
  const order = held.map((_, i) => i).sort((a, b) => held[b] - held[a]);
  const boxes = squarified(order.map((i) => held[i] * scale), area);
  return order.map((i, at) => {
    if (i === seen.length) {
      const lines = [`${counted(unseen)} smaller`, bytesShown(rest)];
      return box("others", boxes[at], { node: null, lines: () => lines }, ...lines);
    }
    return seen[i].row === null ? moduleBox(seen[i], boxes[at], labelShown(seen[i]))
      : leafBox(seen[i], boxes[at]);
  });
}

function hoverLines(node) {
  const bytes = `${bytesShown(node.held)} per device, ${bytesShown(node.bytes)} in all`;
  const leaves = leavesShown(node.leaves);
  if (node.row === null) return [node.path || "all", bytes, leaves];
  const { shape, dtype, spec, rule, notes, problem } = node.row;
  return [
    node.path, bytes, leaves, `shape ${shape}, ${dtype}`, `${report.specs[spec].text}, ${rule}`,
    ...notes, ...(problem ? [problem] : []),
  ];
}

const about = (event) => shown.get(event.target.closest?.(".slice"));

function hover(event) {
  const found = about(event);
  tip.hidden = found === undefined;
  if (tip.hidden) return;
  tip.replaceChildren(...found.lines().map((line) => element("div", {}, line)));
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.min(event.clientY + 18, innerHeight - tip.offsetHeight - 8)}px`;
}

function zoom(event) {
  const node = about(event)?.node;
  if (!node || node.row !== null) return;
  if (node === trail.at(-1)) trail.pop();
  else trail.push(node);
  if (!trail.length) trail = [node];
  tip.hidden = true;
  draw();
}

function draw() {
  const node = trail.at(-1);
  const area = { x: 0, y: 0, width: place.clientWidth, height: place.clientHeight };
  place.replaceChildren(moduleBox(node, area, node.path || "all"));
}

const wholeTree = treeOf(allRows);
let trail = [wholeTree]; // down to what is shown
if (wholeTree.held === 0) {
  place.replaceWith(element("p", { class: "hint" }, "No leaf has any bytes."));
} else {
  place.addEventListener("click", zoom);
  place.addEventListener("pointermove", hover);
  place.addEventListener("pointerleave", () => { tip.hidden = true; });
  // Draws at once, and whenever the page's width changes.
  new ResizeObserver(draw).observe(place);
}
