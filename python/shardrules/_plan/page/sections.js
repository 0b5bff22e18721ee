"use strict";
// Header, findings, rules, meshes: what stands still.

(() => {
  const facts = [
    ["Mesh", meshShown(report.mesh)],
    ["Devices", counted(report.devices)],
    ["Leaves", counted(report.leaves)],
    ["Whole model", bytesShown(report.bytes)],
    ["Fullest device", bytesShown(report.fullest)],
  ];
  const { host, ...onDevice } = report.held;
  const parts = Object.entries(onDevice).filter(([, bytes]) => bytes > 0);
  if (parts.length > 1) {
    facts.push(["Breakdown", parts.map(([name, bytes]) => `${name} ${bytesShown(bytes)}`).join(", ")]);
  }
  if (host > 0) facts.push(["In the host's memory", `${bytesShown(host)} for each device`]);
  const { fits, program, time } = report;
  if (program?.memory) facts.push(["Peak of the step", bytesShown(program.memory.peak)]);
  if (program?.collectives.every(({ sent }) => sent !== null)) {
    const sent = program.collectives.reduce((sum, row) => sum + row.sent, 0);
    facts.push(["Sent in a step", bytesShown(sent)]);
  }
  if (time) facts.push(["A step", `${secondsShown(time.shortest)} to ${secondsShown(time.longest)}`]);
  if (fits !== null) facts.unshift(["Fits", `${fits.yes ? "yes" : "no"}, into ${fits.room}`]);
  const worst = fits !== null && !fits.yes ? "error"
    : report.findings.rows.length ? report.findings.rows[0].level : "right";
  document.getElementById("header").append(
    element("h1", {}, report.title),
    element("p", { class: `verdict ${worst}` }, report.findings.conclusion,
      fits === null || fits.yes ? null : "; it does not fit"),
    element("dl", { class: "facts" },
      facts.map(([name, value]) =>
        element("div", {}, element("dt", {}, name), element("dd", {}, value)))),
  );
})();

(() => {
  const SHOWN_PATHS = 6;
  const TO_DO = 3;
  const section = document.getElementById("findings");
  if (!report.findings.rows.length) {
    section.append(element("p", { class: "hint" }, `${report.findings.conclusion}.`));
    return;
  }
  // Dead rules are one card.
  const isDead = ({ kind, rule }) => kind === "dead" && rule !== null;
  const dead = report.findings.rows.filter(isDead);
  const ofDead = dead.length < 2 ? [] : [{
    ...dead[0], rule: null, message: `${counted(dead.length)} rules match no leaf`,
    paths: dead.map(({ message }) => message), fix: "correct their patterns, or remove them",
  }];
  const cards = report.findings.rows.flatMap((finding) =>
    (!ofDead.length || !isDead(finding) ? [finding] : finding === dead[0] ? ofDead : []));

  function copied({ target }) {
    const range = document.createRange();
    range.selectNodeContents(target.previousElementSibling);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    target.textContent = document.execCommand("copy") ? "Copied" : "Selected";
  }
  const mendOf = ({ mend }) => element("div", { class: "mend" },
    element("pre", { tabindex: 0 }, mend),
    element("button", { type: "button", onclick: copied, "aria-live": "polite" }, "Copy"));

  function card(finding) {
    const more = finding.paths.length - SHOWN_PATHS;
    const facts = [
      finding.rule === null ? null : `rule ${finding.rule}`,
      finding.leaves ? leavesShown(finding.leaves) : null,
      finding.bytes ? `${bytesShown(finding.bytes)} on each device` : null,
    ].filter((fact) => fact !== null);
    return element("li", { class: `finding ${finding.level}` },
      element("p", { class: "what" },
        element("span", { class: "badge" }, finding.level),
        element("strong", {}, finding.kind),
        element("span", { class: "hint" }, facts.join(" · "))),
      element("p", {}, finding.message),
      element("ul", { class: "paths" },
        finding.paths.slice(0, SHOWN_PATHS).map((path) =>
          element("li", {}, element("code", {}, path))),
        more > 0 ? element("li", { class: "hint" }, `and ${counted(more)} more`) : null),
      finding.fix ? element("p", { class: "fix" }, element("b", {}, "Fix: "), finding.fix) : null,
      finding.mend ? mendOf(finding) : null);
  }
  const first = cards.filter(({ level }) => level !== "info").slice(0, TO_DO);
  if (first.length) {
    const todo = document.getElementById("todo");
    todo.hidden = false;
    todo.append(element("ol", { class: "findings" }, first.map(card)));
  }
  const rest = cards.filter((finding) => !first.includes(finding));
  document.getElementById("findings-title").textContent = first.length ? "Further findings" : "Findings";
  section.hidden = !rest.length;
  const list = element("ul", { class: "findings" });
  section.append(list);
  appendPaged(list, rest, card, section, 20);
})();

(() => {
  const section = document.getElementById("rules");
  const [made, body] = table(
    ["Rule", "Pattern", "Spec", "Leaves won", "Bytes", "Bytes per device"], [0, 3, 4, 5]);
  function line(rule) {
    const share = rule.held / Math.max(1, report.fullest + report.held.host);
    const held = element("td", { class: "number bar" }, bytesShown(rule.held));
    held.style.setProperty("--share", `${Math.min(100, 100 * share)}%`);
    return element("tr", { class: rule.leaves ? null : "wins-nothing" },
      element("td", { class: "number" }, rule.rule === null ? "-" : String(rule.rule)),
      element("td", {},
        rule.rule === null ? element("i", {}, rule.pattern) : element("code", {}, rule.pattern),
        rule.leaves ? null : element("span", { class: "badge" }, "wins nothing")),
      element("td", { class: "spec" }, element("code", {}, rule.spec)),
      element("td", { class: "number" }, counted(rule.leaves)),
      element("td", { class: "number" }, bytesShown(rule.bytes)),
      held);
  }
  section.append(scrolled(made, "Table of rules"));
  appendPaged(body, report.rules, line, section);
})();

(() => {
  if (!report.sweep?.rows.length) return;
  const section = document.getElementById("sweep");
  section.hidden = false;
  const [made, body] = table(
    ["Mesh", "Devices", "Fullest device", "Replicated", "Corrections", "Fits"], [1, 2, 3, 4]);
  const onHost = (row) => (row.host_bytes ? ` + ${bytesShown(row.host_bytes)} on the host` : "");
  const verdicts = new Map([[true, "yes"], [false, "no"], [null, "-"]]);
  appendPaged(body, report.sweep.rows, (row) =>
    element("tr", { class: row.fits === false ? "does-not-fit" : null },
      element("td", {}, element("code", {}, meshShown(row.mesh)),
        row.current ? element("span", { class: "badge" }, "this plan") : null),
      element("td", { class: "number" }, counted(row.devices)),
      element("td", { class: "number" }, bytesShown(row.bytes) + onHost(row)),
      element("td", { class: "number" }, bytesShown(row.replicated)),
      element("td", { class: "number" }, counted(row.corrections)),
      element("td", {}, verdicts.get(row.fits))), section);
  section.append(scrolled(made, "Table of meshes"),
    ...report.sweep.notes.map((note) => element("p", { class: "hint" }, note)));
})();

(() => {
  if (!report.program) return;
  const section = document.getElementById("program");
  section.hidden = false;
  const { memory, collectives } = report.program;
  const atPeak = memory && `${bytesShown(memory.peak)} on each device at the peak${memory.alive
    ? `, of which these arrays are ${bytesShown(memory.alive)}` : ""}.`;
  document.getElementById("program-title").after(
    element("p", { class: "hint" }, atPeak ?? "This backend does not tell the memory of programs."));
  const code = (text, kind = null) => element("td", { class: kind }, element("code", {}, text));
  const [made, body] = table(
    ["Sent", "Times", "Collective", "Over", "Array", "Moves", "Why", "Line"], [0, 1]);
  appendPaged(body, collectives, (row) =>
    element("tr", { class: row.is_expected ? null : "large" },
      element("td", { class: "number" }, bytesShown(row.sent ?? row.sent_once)),
      element("td", { class: "number" }, row.times === null ? "per iteration" : counted(row.times)),
      ...[row.kind, row.axes.join(", "), row.shape].map((text) => code(text, "shape")),
      code(row.moves), element("td", {}, row.reason), code(row.place ?? "", "shape")), section);
  section.append(collectives.length ? scrolled(made, "Table of collectives")
    : element("p", { class: "hint" }, "No array moves between devices."));
})();

(() => {
  if (!report.solution) return;
  const section = document.getElementById("solution");
  section.hidden = false;
  const [made, body] = table(["Dimensions", "Size", "Cut by", "Other axes: a step, memory"], [1]);
  body.append(...report.solution.choices.map((choice) =>
    element("tr", { title: choice.arrays.join("\n") },
      element("td", {}, choice.role),
      element("td", { class: "number" }, choice.size === "0" ? "" : choice.size),
      element("td", {}, element("code", {}, choice.axes)),
      element("td", {}, choice.alternatives.join("; ")))));
  const lines = element("ul", { class: "paths" });
  section.append(
    element("p", {}, report.solution.text), scrolled(made, "Table of choices"), lines);
  appendPaged(lines, report.solution.activations, (line) =>
    element("li", {}, element("code", {}, line)), section, 40);
})();

(() => {
  if (!report.suggestion) return;
  const section = document.getElementById("suggestion");
  section.hidden = false;
  const [made, body] = table(["Rules", "Mesh", "Number", "Fullest device", "Fits"], [2, 3]);
  const verdicts = new Map([[true, "yes"], [false, "no"], [null, "-"]]);
  body.append(...report.suggestion.plans.map((plan) =>
    element("tr", { class: plan.fits === false ? "does-not-fit" : null },
      element("td", {}, plan.name),
      element("td", {}, element("code", {}, meshShown(plan.mesh))),
      element("td", { class: "number" }, counted(plan.rules)),
      element("td", { class: "number" }, bytesShown(plan.bytes)),
      element("td", {}, verdicts.get(plan.fits)))));
  const reasons = element("ul", { class: "paths" });
  section.append(scrolled(made, "Table of plans"),
    element("pre", { tabindex: 0 }, report.suggestion.text), reasons);
  appendPaged(reasons, report.suggestion.reasons, (reason) =>
    element("li", {}, element("code", {}, reason)), section, 40);
})();
