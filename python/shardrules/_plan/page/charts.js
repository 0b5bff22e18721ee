"use strict";
// The charts: boxes whose places and colours are set by script. A treemap of what a module holds,
// and bars for meshes.

(() => {
  const place = document.getElementById("treemap");
  const modulesAbove = document.getElementById("treemap-path");
  const tip = document.getElementById("tip");
  // Children smaller than this part of what is shown cannot be seen, and are put together.
  const SMALLEST = 1 / 2000;
  // Heights and widths in pixels.
  const HEAD = 20;
  const GAP = 2;
  const LEAST = 8; // of a box with children in it
  const shown = new WeakMap();
  let trail = []; // from the whole tree down to what is shown

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
    const { text } = report.specs[node.spec];
    const made = box("leaf", area, { node, lines: () => hoverLines(node) },
      labelShown(node), bytesShown(node.held), text);
    made.style.backgroundColor = classOf[node.spec].colour;
    made.style.color = inkOn(classOf[node.spec].colour);
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
    const seen = childrenOf(node).filter((child) => child.held >= least).sort((a, b) => b.held - a.held);
    const held = seen.map((child) => child.held);
    const rest = node.held - held.reduce((total, one) => total + one, 0);
    const unseen = childrenOf(node).length - seen.length;
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
    if (node.row === null) return [keyOf(node) || report.title, bytes, leaves];
    const kind = kindOf(node.row);
    const rule = kind.rule === null ? namesOf(kind) : `rule ${kind.rule}`;
    return [
      patternOf(node.row), bytes, leaves, `shape ${shapeShown(kind.shape)}, ${kind.dtype}`,
      `${report.specs[kind.spec].text}, ${rule}`, ...kind.notes, ...(kind.problem ? [kind.problem] : []),
    ];
  }

  const about = (event) => shown.get(event.target.closest?.(".slice"));

  function hover(event) {
    const found = about(event);
    tip.hidden = found === undefined;
    if (tip.hidden) return;
    tip.replaceChildren(...found.lines().map((line) => element("div", {}, line)));
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const above = event.clientY + 18 + tip.offsetHeight > innerHeight;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${above ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18}px`;
  }

  function zoom(event) {
    const node = about(event)?.node;
    if (!node || node.row !== null) return;
    if (node === trail.at(-1)) trail.pop();
    else trail.push(node);
    if (!trail.length) trail = [node];
    tip.hidden = true;
    drawTreemap();
  }

  function drawTreemap() {
    const [root] = trail;
    const name = (node) => (node === root ? "all" : keyOf(node));
    modulesAbove.replaceChildren(...(trail.length > 1 ? trail : []).map((node, i) => element("button", {
      type: "button", disabled: i === trail.length - 1,
      onclick: () => { trail = trail.slice(0, i + 1); drawTreemap(); },
    }, element("code", {}, i === 0 ? "all" : labelShown(node)))));
    const node = trail.at(-1);
    const area = { x: 0, y: 0, width: place.clientWidth, height: place.clientHeight };
    place.replaceChildren(moduleBox(node, area, name(node)));
  }

  function drawSweep() {
    const BARS = 60;
    const rows = report.sweep.rows.slice(0, BARS);
    const longest = Math.max(report.hbm ?? 0, ...rows.map((row) => row.bytes));
    const percent = (bytes) => `${(100 * bytes) / longest}%`;
    const part = (name, colour, bytes) => {
      const made = element("span", { title: `${name}: ${bytesShown(bytes)}` });
      made.style.width = percent(bytes);
      made.style.backgroundColor = colour;
      return made;
    };
    const bar = (row) => {
      const line = element("span", { class: "bar-line" });
      line.style.left = percent(report.hbm);
      return element("div", { class: "bar-row" },
        element("code", {}, (row.current ? "● " : "") + meshShown(row.mesh)),
        element("div", { class: "bar-track" },
          part("replicated", REPLICATED, row.replicated),
          part("sharded", PALETTE[0], Math.max(0, row.bytes - row.replicated)),
          report.hbm === null ? null : line),
        element("span", { class: "bar-total" },
          bytesShown(row.bytes) + (row.fits === false ? " does not fit" : "")));
    };
    const memory = `┆ memory of a device: ${bytesShown(report.hbm ?? 0)}`;
    document.getElementById("sweep-chart").replaceChildren(
      element("div", { class: "legend" },
        element("span", {}, swatch(REPLICATED), "replicated"),
        element("span", {}, swatch(PALETTE[0]), "sharded"),
        report.hbm === null ? null : element("span", {}, memory)),
      ...rows.map(bar));
  }

  // The arrays at the peak; those that are not named are one box.
  const MEMORY_COLOURS = [["arguments", PALETTE[0]], ["kept for the backward pass", PALETTE[3]],
    ["other arrays", PALETTE[1]]];
  const memoryPlace = document.getElementById("memory");

  function drawMemory() {
    const { buffers, alive } = report.program.memory;
    const rest = alive - buffers.reduce((total, buffer) => total + buffer.bytes, 0);
    const smaller = { bytes: rest, shape: "smaller arrays", what: "", place: null };
    const rows = [...buffers, ...(rest > 0 ? [smaller] : [])].sort((a, b) => b.bytes - a.bytes);
    const area = { x: 0, y: 0, width: memoryPlace.clientWidth, height: memoryPlace.clientHeight };
    const scale = (area.width * area.height) / alive;
    const boxes = squarified(rows.map(({ bytes }) => bytes * scale), area);
    memoryPlace.replaceChildren(...rows.map((buffer, i) => {
      const { bytes, shape, what, place: line } = buffer;
      const lines = [shape, bytesShown(bytes), what, line].filter((text) => text);
      const isRest = buffer === smaller;
      const made = box(isRest ? "others" : "leaf", boxes[i], { node: null, lines: () => lines }, ...lines);
      const colour = MEMORY_COLOURS[buffer.is_argument ? 0 : buffer.is_saved ? 1 : 2][1];
      if (!isRest) Object.assign(made.style, { backgroundColor: colour, color: inkOn(colour) });
      return made;
    }));
  }

  function watch(chart, draw) {
    chart.addEventListener("pointermove", hover);
    chart.addEventListener("pointerleave", () => { tip.hidden = true; });
    // Draws at once, and whenever the page's width changes.
    new ResizeObserver(draw).observe(chart);
  }

  if (report.program?.memory?.alive) {
    document.getElementById("memory-legend").replaceChildren(...MEMORY_COLOURS.map(
      ([name, colour]) => element("span", {}, swatch(colour), name)));
    watch(memoryPlace, drawMemory);
  } else {
    memoryPlace.remove();
  }
  if (report.time) {
    document.getElementById("program").hidden = false;
    document.getElementById("time").textContent = `In all, ${report.time.text}.`;
  }
  if (report.sweep?.rows.length) drawSweep();
  if (!wholeTree || wholeTree.held === 0) {
    place.replaceWith(element("p", { class: "hint" }, "No leaf has any bytes."));
  } else {
    trail = [wholeTree];
    place.addEventListener("click", zoom);
    watch(place, drawTreemap);
  }
  if (report.fingerprint !== null) {
    document.getElementById("footer").append(element("p", {}, `Fingerprint ${report.fingerprint}`));
  }
  document.getElementById("footer").append("Made by shardrules. This file fetches nothing.");
})();
