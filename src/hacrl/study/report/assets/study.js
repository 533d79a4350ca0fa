// The sections of a study. All statistics come from study.json; here they are only shown.

function renderStudy(parent, study, packed, maxMb) {
  const variants = study.variants || [];
  const variantColour = (variant) => {
    if (variant === study.baseline) return "--variant-0";
    const rest = variants.filter((each) => each !== study.baseline);
    return `--variant-${1 + (Math.max(rest.indexOf(variant), 0) % 7)}`;
  };
  const variantName = (variant) => el("span", { class: "agent variant", vars: { "--own": `var(${variantColour(variant)})` } }, String(variant));
  const context = { study, variants, variantColour, variantName };
  renderComparison(parent, context);
  renderForest(parent, context);
  renderAccounting(parent, context);
  renderFailures(parent, context);
  renderCurves(parent, context);
  renderChosen(parent, context, packed, maxMb);
}

function studyFacts(study) {
  const state = (status) => study.runs.filter((run) => run.status === status).length;
  const facts = [
    `${state("done")} of ${plural(study.runs.length, "run")} done`,
    ...["failed", "running", "waiting"].filter(state).map((status) => `${state(status)} ${status}`),
    plural((study.pairs || []).length, "pair"), plural((study.variants || []).length, "variant"), plural((study.seeds || []).length, "seed"),
    study.baseline ? `compared with ${study.baseline}` : null,
  ];
  return el("ul", { class: "facts" }, facts.filter(Boolean).map((fact, i) => el("li", {}, i ? fact : el("b", {}, fact))));
}

function renderFailures(parent, { study }) {
  const failed = study.runs.filter((run) => run.status === "failed");
  if (!failed.length) return;
  const place = section(parent, "failed", "Runs that failed", ["They are in none of the tables and curves. ", el("code", {}, "hacrl study"), " tries them again when it is called again."]);
  for (const run of failed) {
    place.append(el("div", { class: "failure" }, el("h3", {}, `${run.pair}, ${run.variant}, seed ${run.seed}`), el("pre", {}, String(run.error || "no reason was given").slice(0, 5000))));
  }
}

const interval = (low, high, format) => (known(low) && known(high) ? el("span", { class: "interval" }, `${format(low)} to ${format(high)}`) : null);

function byPair(study, rows) {
  return (study.pairs || []).map((pair) => [pair, rows.filter((row) => row.pair === pair)]).filter(([, own]) => own.length);
}

function agentsOf(study, pair) {
  return [...new Set((study.agents || []).filter((row) => row.pair === pair).map((row) => row.agent))];
}

function pValue(p) {
  if (!known(p)) return NONE;
  return p < 0.001 ? "< 0.001" : p.toFixed(3);
}

function renderComparison(parent, { study, variants, variantName }) {
  const seeds = (study.seeds || []).length;
  const place = section(parent, "result", "Result", `Final accuracy on held-out problems: means over seeds with 95% intervals, and paired differences to ${study.baseline ?? "the baseline"} in points. p is corrected for the number of comparisons (Holm).`);
  if (seeds < 3) place.append(empty(`This study has ${plural(seeds, "seed")}: too few to tell a difference from chance. Take intervals and p as a rough guide, or add seeds.`));
  const rows = study.agents || [];
  if (!rows.length) { place.append(empty("No run is done yet.")); return; }
  for (const [pair, own] of byPair(study, rows)) {
    const agents = agentsOf(study, pair);
    const lines = [];
    for (const agent of [...agents, "all"]) {
      const compared = (study.comparisons || []).filter((row) => row.pair === pair && row.agent === agent);
      if (agent === "all" && (agents.length < 2 || !compared.length)) continue;
      let first = true;
      for (const variant of variants) {
        const row = own.find((each) => each.agent === agent && each.variant === variant);
        const difference = compared.find((each) => each.variant === variant);
        if (!row && !difference) continue;
        const index = agents.indexOf(agent);
        const sign = difference && known(difference.low) && known(difference.high) ? (difference.low > 0 ? "better" : difference.high < 0 ? "worse" : "") : "";
        lines.push({ class: first ? "first" : null, cells: [
          first ? (agent === "all" ? "mean of the agents" : agentName(agent, index)) : el("span", { class: "hidden" }, agent),
          variantName(variant),
          row && first ? fixed(row.start) : "",
          row ? [el("b", {}, fixed(row.mean)), interval(row.low, row.high, fixed)] : "",
          difference ? [el("span", { class: sign }, points(difference.difference)), interval(difference.low, difference.high, points)] : variant === study.baseline ? el("span", { class: "muted" }, "baseline") : NONE,
          difference ? pValue(difference.p_holm) : "",
          difference ? fixed(difference.effect, 2) : "",
          difference && known(difference.wins) ? `${difference.wins} : ${difference.losses}` : "",
          { text: difference?.note || "", class: "note" },
        ] });
        first = false;
      }
    }
    const noted = lines.some((line) => line.cells.at(-1).text);
    const head = ["agent", "variant", "start", "final accuracy", "difference, points", "p (Holm)", "effect", "seeds won : lost", ...(noted ? ["note"] : [])];
    for (const line of lines) line.cells.length = head.length;
    place.append(table(head, lines, { className: "grouped", caption: (study.pairs || []).length > 1 ? String(pair) : undefined, textColumns: 2 }));
  }
}

function renderForest(parent, { study, variants, variantColour }) {
  const place = section(parent, "differences", "Differences");
  const rows = (study.comparisons || []).filter((row) => known(row.difference));
  if (!rows.length) { place.append(empty("Nothing to compare yet: a difference needs finished runs of a variant and of the baseline with the same seed.")); return; }
  const items = [];
  for (const [pair, own] of byPair(study, rows)) {
    items.push({ heading: String(pair) });
    const agents = [...new Set(own.map((row) => row.agent))].sort((a, b) => (a === "all") - (b === "all"));
    for (const agent of agents) for (const variant of variants) {
      const row = own.find((each) => each.agent === agent && each.variant === variant);
      if (row) items.push({ row, text: `${agent === "all" ? "mean" : agent} · ${variant}` });
    }
  }
  const single = items.filter((item) => item.heading).length === 1;
  const shown = single ? items.slice(1) : items;
  addFigure(place, {
    title: `Points of accuracy more than ${study.baseline}`,
    read: "Each dot is the mean paired difference over seeds, a diamond that of the agents' mean; the line is the 95% interval. Right of 0 is better than the baseline; a line that crosses 0 may be chance.",
    height: 60 + 26 * shown.length,
    numbered: false, // they stand in the table above
    build: (width) => {
      const left = Math.min(width * 0.42, 12 + 6.6 * highest(shown.map((item) => [...(item.text || item.heading)].length)));
      const limit = Math.floor((left - 12) / 6.4);
      const layout = baseLayout(width, { xTitle: "difference in points", left });
      const at = (i) => shown.length - 1 - i;
      const traces = variants.flatMap((variant) => {
        const own = shown.map((item, i) => ({ ...item, y: at(i) })).filter((item) => item.row?.variant === variant);
        if (!own.length) return [];
        const percentage = (name) => own.map((item) => 100 * item.row[name]);
        const shade = colour(variantColour(variant));
        const reach = (bound, sign) => own.map((item) => (known(item.row[bound]) ? 100 * sign * (item.row[bound] - item.row.difference) : 0));
        return [{
          type: "scatter", mode: "markers", name: label(variant), x: percentage("difference"), y: own.map((item) => item.y),
          marker: { color: shade, size: own.map((item) => (item.row.agent === "all" ? 11 : 8)), opacity: 1, symbol: own.map((item) => (item.row.agent === "all" ? "diamond" : "circle")) },
          error_x: { type: "data", symmetric: false, array: reach("high", 1), arrayminus: reach("low", -1), color: shade, thickness: 1.8, width: 0 },
          text: own.map((item) => `${label(item.text, 60)}<br>${points(item.row.difference)} points${known(item.row.low) ? ` (${points(item.row.low)} to ${points(item.row.high)})` : ""}`),
          hovertemplate: "%{text}<extra></extra>",
        }];
      });
      const ends = rows.flatMap((row) => [row.difference, row.low, row.high]).filter(known).map((value) => 100 * value);
      layout.hovermode = "closest";
      layout.dragmode = false;
      layout.xaxis.range = extent([ends, [0]], { least: 1, pad: 0.06 });
      layout.xaxis.ticksuffix = "";
      layout.xaxis.showgrid = true;
      layout.xaxis.gridcolor = colour("--line");
      Object.assign(layout.yaxis, { range: [-0.7, shown.length - 0.3], showgrid: false, tickmode: "array", tickvals: shown.map((_, i) => at(i)), fixedrange: true,
        ticktext: shown.map((item) => (item.heading ? `<b>${label(item.heading, limit)}</b>` : label(item.text, limit))) });
      layout.shapes.push({ type: "line", x0: 0, x1: 0, yref: "paper", y0: 0, y1: 1, layer: "below", line: { color: colour("--muted"), width: 1.2 } });
      return { traces, layout };
    },
  });
}

function renderAccounting(parent, { study, variantName }) {
  const place = section(parent, "cost", "What it cost", "Means over seeds. Equal rollouts are not equal updates: a learner that sees more rollouts makes more updates.");
  const rows = study.accounting || [];
  if (!rows.length) { place.append(empty("No run is done yet.")); return; }
  for (const [pair, own] of byPair(study, rows)) {
    place.append(table(["variant", "agent", "rollouts", "tokens sampled", "tokens trained", "updates", "time", "sampling", "learning", "memory, GiB"],
      own.flatMap((row) => {
        const agents = (study.agents || []).filter((each) => each.pair === pair && each.variant === row.variant && each.accounting);
        const costs = (each) => [count(each.rollouts), count(each.tokens), count(each.tokens_trained), count(each.updates)];
        return [
          { class: "first", cells: [variantName(row.variant), el("b", {}, "in all"), ...costs(row), duration(row.seconds), "", "", fixed(row.peak_memory_gib, 2)] },
          ...agents.map((each) => [el("span", { class: "hidden" }, String(row.variant)), agentName(each.agent, agentsOf(study, pair).indexOf(each.agent)), ...costs(each.accounting), "", duration(each.accounting.sample_seconds), duration(each.accounting.learn_seconds), fixed(each.accounting.peak_memory_gib, 2)]),
        ];
      }), { className: "grouped", caption: (study.pairs || []).length > 1 ? String(pair) : undefined, textColumns: 2 }));
  }
}

function renderCurves(parent, { study, variants, variantColour }) {
  const place = section(parent, "learning", "Learning curves", "Accuracy on held-out problems: lines are means over the finished seeds, bands go from the lowest to the highest seed.");
  if (!study.curves.length) { place.append(empty("No run with evaluations is done yet.")); return; }
  let axis = "rollouts";
  const drawn = [];
  place.append(choice("Horizontal axis", AXES, (value) => {
    axis = value;
    for (const figure of drawn) if (figure?.drawn) draw(figure, true);
  }));
  place.append(legend(variants.map((variant) => ({ name: variant === study.baseline ? `${variant} (baseline)` : String(variant), colour: variantColour(variant), kind: "line" }))));
  for (const [pair, own] of byPair(study, study.curves)) {
    if ((study.pairs || []).length > 1) place.append(el("h3", { class: "pair" }, String(pair)));
    const grid = place.appendChild(el("div", { class: "figures", vars: { "--least": "380px" } }));
    const agents = [...new Set(own.map((curve) => curve.agent))];
    for (const agent of agents) {
      const curves = variants.map((variant) => own.find((curve) => curve.agent === agent && curve.variant === variant)).filter(Boolean);
      drawn.push(addFigure(grid, {
        title: el("span", {}, agentName(agent, agents.indexOf(agent), "wraps"), (study.pairs || []).length > 1 ? ` in ${pair}` : ""),
        read: "The higher line at the same place has made more of the same effort.",
        height: 290,
        build: (width, height) => {
          const [unit, xTitle] = axis === "seconds" ? timeUnit(curves.flatMap((curve) => curve.seconds)) : [1, AXIS_TITLES[axis]];
          const x = (curve) => curve[axis].map((value) => value / unit);
          return lineChart({
            lines: curves.map((curve) => ({ name: curve.variant, x: x(curve), y: curve.mean, colour: variantColour(curve.variant), dash: curve.variant === study.baseline ? "6px,3px" : "solid", markers: curve.mean.length < 25 })),
            bands: curves.filter((curve) => curve.seeds > 1).map((curve) => ({ x: x(curve), low: curve.low, high: curve.high, colour: variantColour(curve.variant), opacity: 0.13, names: [`${curve.variant}, lowest`, `${curve.variant}, highest`] })),
            xTitle, xFormat: axis === "seconds" ? "~g" : ",",
          })(width, height);
        },
      }));
    }
  }
}

// One run of the study in detail, chosen by pair, variant and seed.
function renderChosen(parent, { study }, packed, maxMb) {
  const place = section(parent, "run", "One run in detail", "Choose a run; everything below belongs to it.");
  const there = study.runs.map((run, index) => ({ ...run, index })).filter((run) => run.data);
  if (!there.length) { place.append(empty("No run has begun yet.")); return; }
  const host = el("div", { id: "chosen" });
  const field = (name) => {
    const select = el("select", { name }, [...new Set(there.map((run) => run[name]))].map((value) => el("option", { value: String(value) }, String(value))));
    select.addEventListener("change", show);
    return select;
  };
  const fields = { pair: field("pair"), variant: field("variant"), seed: field("seed") };
  const shared = there.find((run) => run.data.shares && run.data.agents.length > 1 && run.status === "done") || there[0];
  for (const name of Object.keys(fields)) fields[name].value = String(shared[name]);
  place.append(el("form", { class: "filters", "aria-label": "Choose a run", onsubmit: (event) => event.preventDefault() },
    el("label", {}, "Pair", fields.pair), el("label", {}, "Variant", fields.variant), el("label", {}, "Seed", fields.seed)), host);
  function show() {
    forget(host);
    const run = there.find((each) => Object.keys(fields).every((name) => String(each[name]) === fields[name].value));
    host.replaceChildren();
    if (!run) { host.append(empty("This run has not begun, or its folder is gone.")); browser = null; return; }
    host.append(el("h3", { class: "chosen" }, `${run.pair} · ${run.variant} · seed ${run.seed}`), runFacts(run.data));
    const part = host.appendChild(el("div", { class: "one-run" }));
    renderRun(part, run.data);
    renderRollouts(part, run.data, run.index, packed[run.index], maxMb);
    renderSettings(part, run.data);
    for (const node of part.querySelectorAll("section")) {
      node.querySelector("h2").id = `one-${node.id}-title`;
      node.setAttribute("aria-labelledby", `one-${node.id}-title`);
      node.id = `one-${node.id}`;
    }
  }
  show();
}
