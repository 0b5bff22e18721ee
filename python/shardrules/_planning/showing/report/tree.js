"use strict";
// Folded rows as a tree of modules, and a folded row as its single paths.

// A row is [parts, kind, leaves]; parts are texts and sets of numbers by turns.
const patternOf = (row) => row[0].join("");
const kindOf = (row) => report.kinds[row[1]];

const boundary = new RegExp(
  `(?=[${report.separators.replace(/[\]\\^[-]/g, "\\$&")}])`, "u");

// Modules are told apart as deep as this; what is below them keeps its separators.
const DEEPEST = 50;

// A pattern cut before each separator; a set is never cut.
function components(row) {
  const pieces = [""];
  row[0].forEach((part, i) => {
    const [first, ...more] = i % 2 === 0 ? part.split(boundary) : [part];
    // What follows a set begins a component only if it begins with a separator.
    if (i > 0 && first && i % 2 === 0 && report.separators.includes(first[0])) pieces.push(first);
    else pieces[pieces.length - 1] += first ?? "";
    for (const piece of more) pieces.push(piece);
  });
  return pieces.length <= DEEPEST ? pieces
    : [...pieces.slice(0, DEEPEST - 1), pieces.slice(DEEPEST - 1).join("")];
}

function leafNode(row, label, key) {
  const kind = kindOf(row);
  const leaves = row[2];
  return {
    label, key, row, kind, leaves, children: null, spec: kind.spec,
    bytes: leaves * kind.bytes, held: leaves * kind.held, lost: kind.notes.length ? leaves : 0,
  };
}

// The tree of these rows: modules and their sums; leaves are the rows.
function treeOf(rows) {
  const root = moduleNode("", "");
  for (const row of rows) {
    const pieces = components(row);
    let node = root;
    let key = "";
    for (const piece of pieces.slice(0, -1)) {
      key += piece;
      if (!node.modules.has(piece)) {
        const made = moduleNode(piece, key);
        node.modules.set(piece, made);
        node.children.push(made);
      }
      node = node.modules.get(piece);
    }
    // Two rows may have one pattern, so that the row's number is part of the key.
    node.children.push(leafNode(row, pieces.at(-1), `${key}${pieces.at(-1)}\n${row[1]}`));
  }
  return summed(root);
}

const moduleNode = (label, key) =>
  ({ label, key, row: null, kind: null, children: [], modules: new Map() });

// Sums of the children; a module with a single child is shown as one with it.
function summed(node) {
  if (node.children === null) return node;
  node.children = node.children.map(summed);
  if (node.children.length === 1 && node.key !== "") {
    const [child] = node.children;
    return { ...child, label: node.label + child.label };
  }
  for (const sum of ["leaves", "bytes", "held", "lost"])
    node[sum] = node.children.reduce((total, child) => total + child[sum], 0);
  const specs = new Set(node.children.map((child) => child.spec));
  node.spec = specs.size === 1 ? node.children[0].spec : null;
  return node;
}

// Without the separator that it begins with, unless nothing else is left.
const labelShown = (node) => node.label.replace(/^[/.](?=.)/su, "");

// {0,2..5} as runs [[0n, 1], [2n, 4]]: the first number, which may have 18 digits, and how many.
const runsOf = (set) => set.slice(1, -1).split(",").map((run) => {
  const [first, last = first] = run.split("..").map(BigInt);
  return [first, Number(last - first) + 1];
});
const sizeOf = (runs) => runs.reduce((size, [, length]) => size + length, 0);

function memberOf(runs, index) {
  for (const [first, length] of runs) {
    if (index < length) return first + BigInt(index);
    index -= length;
  }
  return null;
}

// How many paths a row stands for, and its path of a number: none is made before it is asked for.
function singles(row) {
  const runs = row[0].map((part, i) => (i % 2 ? runsOf(part) : null));
  const sizes = runs.map((one) => (one ? sizeOf(one) : 1));
  const count = sizes.reduce((product, size) => product * size, 1);
  function at(index) {
    const texts = [...row[0]];
    for (let i = texts.length - 1; i > 0; i -= 1) {
      if (!runs[i]) continue;
      texts[i] = memberOf(runs[i], index % sizes[i]);
      index = Math.floor(index / sizes[i]);
    }
    return texts.join("");
  }
  return { count, at };
}

// The first `limit` of the row's paths: those that contain the text, if any do.
function singlePaths(row, text, limit) {
  const { count, at } = singles(row);
  if (text) {
    const found = [];
    for (let i = 0; i < count; i += 1) {
      const path = at(i);
      if (path.toLowerCase().includes(text)) found.push(path);
    }
    if (found.length) return { count: found.length, paths: found.slice(0, limit) };
  }
  return { count, paths: Array.from({ length: Math.min(limit, count) }, (_, i) => at(i)) };
}
