"use strict";
// The data, and what both parts of the page use. Names reach the page as text nodes and attributes
// only, never as markup.

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
