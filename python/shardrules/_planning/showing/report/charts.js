"use strict";
// The charts, drawn by plotly.js, which reads some markup in its texts.

(() => {
  const plain = (text) => {
    const cut = text.length > 80 ? `${text.slice(0, 79)}…` : text;
    return cut.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  };
  const config = { displayModeBar: false, responsive: true };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const layout = (more) => ({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: css("--text"), family: "system-ui, sans-serif", size: 13 },
    hoverlabel: {
      align: "left", bgcolor: css("--raised"), bordercolor: css("--hint"),
      font: { color: css("--text"), family: "system-ui, sans-serif" },
    },
    ...more,
  });

  // Nodes smaller than this part of all cannot be seen, and are put together.
  const SMALLEST = 1 / 2000;

  function treemapNodes(tree) {
    const nodes = [];
    const add = (parent, label, held, spec, text, hover) => {
      const id = String(nodes.length);
      nodes.push({ id, parent, label, held, spec, text, hover });
      return id;
    };
    (function visit(node, parent) {
      const id = add(parent, node === tree ? "all" : plain(labelShown(node)), node.held,
        node.row ? node.spec : null, tileText(node), hoverText(node));
      const seen = (node.children ?? []).filter((child) => child.held >= SMALLEST * tree.held);
      seen.forEach((child) => visit(child, id));
      const rest = node.held - seen.reduce((total, child) => total + child.held, 0);
      const unseen = (node.children?.length ?? 0) - seen.length;
      if (rest > 0 && unseen > 0) {
        const text = `${counted(unseen)} smaller`;
        add(id, text, rest, null, bytesShown(rest), `${text}<br>${bytesShown(rest)}`);
      }
    })(tree, "");
    return nodes;
  }

  const tileText = (node) => [
    bytesShown(node.held),
    node.row ? plain(report.specs[node.spec].text) : null,
  ].filter((text) => text !== null).join("<br>");

  function hoverText(node) {
    const bytes = `${bytesShown(node.held)} per device, ${bytesShown(node.bytes)} in all`;
    const leaves = leavesShown(node.leaves);
    if (!node.row) return [plain(node.key || report.title), bytes, leaves].join("<br>");
    const { kind } = node;
    const rule = kind.rule === null ? namesOf(kind) : `rule ${kind.rule}`;
    return [
      plain(patternOf(node.row)), bytes, leaves,
      plain(`shape ${shapeShown(kind.shape)}, ${kind.dtype}`),
      plain(`${report.specs[kind.spec].text}, ${rule}`),
      ...kind.notes.map(plain), ...(kind.problem ? [plain(kind.problem)] : []),
    ].join("<br>");
  }

  const tree = report.rows.length ? treeOf(report.rows) : { held: 0 };
  const nodes = tree.held > 0 ? treemapNodes(tree) : [];

  function drawTreemap() {
    const place = document.getElementById("treemap");
    if (!nodes.length) {
      place.replaceWith(element("p", { class: "hint" }, "No leaf has any bytes."));
      return;
    }
    const column = (name) => nodes.map((node) => node[name]);
    Plotly.react(place, [{
      type: "treemap", branchvalues: "total",
      ids: column("id"), parents: column("parent"), labels: column("label"),
      values: column("held"), text: column("text"), textinfo: "label+text",
      hovertext: column("hover"), hoverinfo: "text", sort: true,
      marker: {
        colors: nodes.map(({ spec }) => (spec === null ? css("--module") : classOf[spec].colour)),
        line: { color: css("--page"), width: 1 }, pad: { t: 20, l: 3, r: 3, b: 3 },
      },
      pathbar: { thickness: 22 }, tiling: { pad: 2 },
    }], layout({ margin: { t: 26, l: 0, r: 0, b: 0 } }), config);
  }

  // A round number that fits into the length at most six times.
  function tickStep(length) {
    const power = 10 ** Math.floor(Math.log10(Math.max(length, 1) / 6));
    return [1, 2, 5, 10].map((factor) => factor * power).find((step) => 6 * step >= length);
  }

  function drawSweep() {
    const BARS = 60;
    const rows = report.sweep.slice(0, BARS);
    const places = rows.map((_, i) => i);
    const bar = (name, colour, x, text) => ({
      type: "bar", orientation: "h", name, x, y: places, text, textposition: "outside",
      cliponaxis: false, marker: { color: colour },
      hovertext: x.map((value, i) => `${plain(meshShown(rows[i].mesh))}<br>${name}: ${bytesShown(value)}`),
      hoverinfo: "text",
    });
    const replicated = rows.map((row) => row.replicated);
    const sharded = rows.map((row) => Math.max(0, row.bytes - row.replicated));
    const totals = rows.map((row) =>
      bytesShown(row.bytes) + (row.fits === false ? " does not fit" : ""));
    const longest = Math.max(report.hbm ?? 0, ...rows.map((row) => row.bytes));
    const step = tickStep(longest);
    const ticks = Array.from({ length: Math.floor(longest / step) + 1 }, (_, i) => i * step);
    const line = { type: "line", xref: "x", yref: "paper", x0: report.hbm, x1: report.hbm, y0: 0, y1: 1,
      line: { color: css("--text"), dash: "dash", width: 2 } };
    const name = { xref: "x", yref: "paper", x: report.hbm, y: 1, yanchor: "bottom", yshift: 24,
      showarrow: false, text: `memory of a device: ${bytesShown(report.hbm ?? 0)}` };
    const place = document.getElementById("sweep-chart");
    place.style.height = `${130 + 30 * rows.length}px`;
    Plotly.react(place, [
      bar("replicated", REPLICATED, replicated),
      bar("sharded", PALETTE[0], sharded, totals),
    ], layout({
      barmode: "stack", margin: { t: 60, l: 10, r: 20, b: 40 },
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", traceorder: "normal" },
      xaxis: { range: [0, longest * 1.2], tickvals: ticks, ticktext: ticks.map(bytesShown),
        gridcolor: css("--line"), fixedrange: true },
      yaxis: { autorange: "reversed", automargin: true, fixedrange: true, tickvals: places,
        ticktext: rows.map((row) => (row.current ? "● " : "") + plain(meshShown(row.mesh))) },
      shapes: report.hbm === null ? [] : [line],
      annotations: report.hbm === null ? [] : [name],
    }), config);
  }

  function draw() {
    drawTreemap();
    if (report.sweep?.length) drawSweep();
  }
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  document.getElementById("footer").append(
    `Made by shardrules; charts by plotly.js ${Plotly.version} (MIT licence). ` +
    "This file fetches nothing.");
})();
