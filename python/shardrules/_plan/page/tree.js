"use strict";
// Folded rows as a tree of modules. A module is split when it is asked for its children, so that a million rows cost a pass for each level that is looked at.

// What a row stands for: a pattern; and where its components begin, if it has sets of numbers.
const patterns = report.rows.paths.map((path) => (typeof path === "string" ? path : path.join("")));
const cutsOf = new Map(report.rows.paths.flatMap((path, row) =>
  (typeof path === "string" ? [] : [[row, cutsOfParts(path)]])));
const allRows = report.rows.paths.map((_, row) => row);

const patternOf = (row) => patterns[row];
const leavesOf = (row) => report.rows.leaves[row];
const kindOf = (row) => report.kinds[report.rows.kinds[row]];

// Modules are told apart as deep as this; what is below them keeps its separators.
const DEEPEST = 50;

// Where components begin, but for the first: at separators that are not in a set.
function cutsOfParts(parts) {
  const cuts = [];
  let place = 0;
  parts.forEach((part, i) => {
    if (i % 2 === 0) {
      for (let j = 0; j < part.length; j += 1)
        if (report.separators.includes(part[j]) && place + j > 0) cuts.push(place + j);
    }
    place += part.length;
  });
  return cuts;
}

// Where the component after this place begins; -1 if there is none.
function nextCut(row, place) {
  if (cutsOf.has(row)) return cutsOf.get(row).find((cut) => cut > place) ?? -1;
  let first = -1;
  for (const separator of report.separators) {
    const found = patterns[row].indexOf(separator, place + 1);
    if (found >= 0 && (first < 0 || found < first)) first = found;
  }
  return first;
}

// A module, or a leaf, which is a row: the part of patterns from `start` to `end`.
function newNode(row, start, end, depth) {
  return {
    row: null, first: row, rows: null, children: null, start, end, depth,
    leaves: 0, bytes: 0, held: 0, spec: kindOf(row).spec,
  };
}

function addRow(node, row) {
  const kind = kindOf(row);
  const leaves = leavesOf(row);
  if (node.rows !== null) node.rows.push(row);
  else if (node.first !== row) node.rows = [node.first, row];
  node.leaves += leaves;
  node.bytes += leaves * kind.bytes;
  node.held += leaves * kind.held;
  if (node.spec !== kind.spec) node.spec = null;
}

function leafNode(row, start) {
  const node = newNode(row, start, patterns[row].length, 0);
  addRow(node, row);
  node.row = row;
  return node;
}

// The tree of these rows: its children are those of `childrenOf`.
function treeOf(rows) {
  if (!rows.length) return null;
  const root = newNode(rows[0], 0, 0, 0);
  for (const row of rows) addRow(root, row);
  root.rows ??= [root.first];
  return root;
}

const wholeTree = treeOf(allRows);

function childrenOf(node) {
  node.children ??= split(node);
  return node.children;
}

function split({ rows, end, depth }) {
  const modules = new Map();
  const children = [];
  let last = null;
  let label = "";
  for (const row of rows) {
    const cut = depth + 1 < DEEPEST ? nextCut(row, end) : -1;
    if (cut < 0) {
      children.push(leafNode(row, end));
      continue;
    }
    // Rows of one module often come together.
    if (last === null || last.end !== cut || !patterns[row].startsWith(label, end)) {
      label = patterns[row].slice(end, cut);
      last = modules.get(label);
      if (last === undefined) {
        last = newNode(row, end, cut, depth + 1);
        modules.set(label, last);
        children.push(last);
      }
    }
    addRow(last, row);
  }
  for (const child of children) joinOnly(child);
  return children;
}

// Makes a module with a single child one with it.
function joinOnly(node) {
  if (node.row !== null) return;
  if (node.rows === null) {
    node.row = node.first;
    node.end = patterns[node.row].length;
    return;
  }
  while (node.depth + 1 < DEEPEST) {
    const cut = nextCut(node.first, node.end);
    const label = patterns[node.first].slice(node.end, cut);
    const isOnly = (row) => nextCut(row, node.end) === cut && patterns[row].startsWith(label, node.end);
    if (cut < 0 || !node.rows.every(isOnly)) return;
    node.end = cut;
    node.depth += 1;
  }
}

// The pattern from the beginning on; two rows may have one.
const keyOf = (node) =>
  (node.row === null ? patterns[node.first].slice(0, node.end) : `${patterns[node.row]}\n${node.row}`);
// Without the separator that it begins with, unless nothing else is left.
const labelShown = (node) =>
  patterns[node.first].slice(node.start, node.end).replace(/^[/.](?=.)/su, "");
