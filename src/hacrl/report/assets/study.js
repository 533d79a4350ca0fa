// The sections of a study. All statistics come from study.json; here they are only shown.

function renderStudy(parent, study, packed, maxMb) {
  const variants = study.variants || [];
  const variantColour = (variant) => {
    if (variant === study.baseline) return "--variant-0";
    const rest = variants.filter((each) => each !== study.baseline);
    return `--variant-${1 + (Math.max(rest.indexOf(variant), 0) % 11)}`;
  };
  const variantName = (variant) => el("span", { class: "agent variant", vars: { "--own": `var(${variantColour(variant)})` } }, String(variant));
  // The baseline is dashed, and where there are many variants the later ones are dotted.
  const variantDash = (variant) => (variant === study.baseline ? "6px,3px" : variants.indexOf(variant) > 6 ? "2px,2px" : "solid");
  const context = { study, variants, variantColour, variantName, variantDash };
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
    plural((study.teams || []).length, "team"), plural((study.variants || []).length, "variant"), plural((study.seeds || []).length, "seed"),
    study.baseline ? `compared with ${study.baseline}` : null,
  ];
  return el("ul", { class: "facts" }, facts.filter(Boolean).map((fact, i) => el("li", {}, i ? fact : el("b", {}, fact))));
}

function renderFailures(parent, { study }) {
  const failed = study.runs.filter((run) => run.status === "failed");
  if (!failed.length) return;
  const place = section(parent, "failed", "Runs that failed", ["They are in none of the tables and curves. ", el("code", {}, "hacrl study"), " tries them again when it is called again."]);
  for (const run of failed) {
    place.append(el("div", { class: "failure" }, el("h3", {}, `${run.team}, ${run.variant}, seed ${run.seed}`), el("pre", {}, String(run.error || "no reason was given").slice(0, 5000))));
  }
}

const interval = (low, high, format) => (known(low) && known(high) ? el("span", { class: "interval" }, `${format(low)} to ${format(high)}`) : null);

function byTeam(study, rows) {
  return (study.teams || []).map((team) => [team, rows.filter((row) => row.team === team)]).filter(([, own]) => own.length);
}

function agentsOf(study, team) {
  return [...new Set((study.agents || []).filter((row) => row.team === team).map((row) => row.agent))];
}

function pValue(p) {
  if (!known(p)) return NONE;
  return p < 0.001 ? "< 0.001" : p.toFixed(3);
}

// A difference with its interval. Bold: the interval leaves out 0. Coloured: p holds after Holm's correction, too.
function differenceCell(row) {
  if (!row) return NONE;
  const clear = known(row.low) && known(row.high) && (row.low > 0 || row.high < 0);
  const sure = clear && known(row.p_holm) && row.p_holm < 0.05;
  return [el("span", { class: sure ? (row.difference > 0 ? "better" : "worse") : clear ? "clear" : null }, points(row.difference)), interval(row.low, row.high, points)];
}

function renderComparison(parent, { study, variants, variantName }) {
  const seeds = (study.seeds || []).length;
  const sampled = study.metric === "final_sampled";
  const place = section(parent, "result", "Result", `${sampled ? "Final accuracy of sampled answers to" : "Final accuracy on"} held-out problems: means over seeds with 95% intervals, and paired differences to ${study.baseline ?? "the baseline"} in points. Bold: the interval leaves out 0. p is corrected for the number of comparisons (Holm); coloured where it stays below 0.05.`);
  if (seeds < 3) place.append(empty(`This study has ${plural(seeds, "seed")}: too few to tell a difference from chance. Take intervals and p as a rough guide, or add seeds.`));
  else if (seeds < 6) place.append(el("p", { class: "small" }, `With ${seeds} seeds p cannot be below ${2 / 2 ** seeds}, even before the correction: direction and size can be seen, significance cannot.`));
  renderDecisions(place, study.runs.flatMap((run) => (run.data ? [run.data] : [])));
  if ((study.teams || []).length > 1) renderOverview(place, study, variants, variantName);
  const rows = study.agents || [];
  if (!rows.length) { place.append(empty("No run is done yet.")); return; }
  for (const [team, own] of byTeam(study, rows)) {
    const agents = agentsOf(study, team);
    const lines = [];
    for (const agent of [...agents, "all"]) {
      const compared = (study.comparisons || []).filter((row) => row.team === team && row.agent === agent);
      if (agent === "all" && (agents.length < 2 || !compared.length)) continue;
      let first = true;
      for (const variant of variants) {
        const row = own.find((each) => each.agent === agent && each.variant === variant);
        const difference = compared.find((each) => each.variant === variant);
        if (!row && !difference) continue;
        const index = agents.indexOf(agent);
        lines.push({ class: first ? "first" : null, cells: [
          first ? (agent === "all" ? "mean of the agents" : agentName(agent, index)) : el("span", { class: "hidden" }, agent),
          variantName(variant),
          row && first ? fixed(row.start) : "",
          row ? [el("b", {}, fixed(row.mean)), interval(row.low, row.high, fixed)] : "",
          difference ? differenceCell(difference) : variant === study.baseline ? el("span", { class: "muted" }, "baseline") : NONE,
          difference ? pValue(difference.p_holm) : "",
          difference ? fixed(difference.effect, 2) : "",
          difference && known(difference.wins) ? `${difference.wins} : ${difference.losses}` : "",
          { text: difference?.note || "", class: "note" },
        ] });
        first = false;
      }
    }
    const noted = lines.some((line) => line.cells.at(-1).text);
    const head = ["agent", "variant", "start", sampled ? "final, sampled" : "final accuracy", "difference, points", "p (Holm)", "effect", "seeds won : lost", ...(noted ? ["note"] : [])];
    for (const line of lines) line.cells.length = head.length;
    place.append(table(head, lines, { className: "grouped", caption: (study.teams || []).length > 1 ? String(team) : undefined, textColumns: 2 }));
  }
}

// All teams at a glance: the mean of the agents' differences.
function renderOverview(place, study, variants, variantName) {
  const rows = study.comparisons || [];
  if (!rows.length) return;
  const overall = rows.some((row) => row.team === "all") ? ["all"] : []; // the agents of all teams together
  const head = ["variant", ...study.teams.map(String), ...overall.map(() => "all teams")];
  const lines = variants.filter((variant) => variant !== study.baseline).map((variant) => [variantName(variant), ...[...study.teams, ...overall].map((team) => {
    const own = rows.filter((row) => row.team === team && row.variant === variant);
    return { text: differenceCell(own.find((row) => row.agent === "all") || (own.length === 1 ? own[0] : null)) };
  })]);
  place.append(table(head, lines, { className: "overview", caption: `Difference to ${study.baseline} in points, mean of the agents of each team` }));
}

function renderForest(parent, { study, variants, variantColour }) {
  const place = section(parent, "differences", "Differences", "Each dot is a mean paired difference over seeds, its line the 95% interval. Right of 0 is better than the baseline; a line that crosses 0 may be chance.");
  const rows = (study.comparisons || []).filter((row) => known(row.difference));
  if (!rows.length) { place.append(empty("Nothing to compare yet: a difference needs finished runs of a variant and of the baseline with the same seed.")); return; }
  const ends = rows.flatMap((row) => [row.difference, row.low, row.high]).filter(known).map((value) => 100 * value);
  const range = extent([ends, [0]], { least: 1, pad: 0.06 });
  const grid = place.appendChild(el("div", { class: "figures", vars: { "--least": "440px" } }));
  for (const [team, own] of byTeam(study, rows)) {
    const items = [];
    for (const agent of [...agentsOf(study, team), "all"]) {
      const shown = variants.map((variant) => own.find((row) => row.agent === agent && row.variant === variant)).filter(Boolean);
      if (shown.length) items.push({ heading: agent === "all" ? "mean of the agents" : agent }, ...shown.map((row) => ({ row })));
    }
    addFigure(grid, {
      title: (study.teams || []).length > 1 ? String(team) : `Points of accuracy more than ${study.baseline}`,
      height: 58 + 21 * items.length,
      numbered: false, // they stand in the table above
      build: (width) => forest(width, items, range, variants, variantColour),
    });
  }
}

function forest(width, items, range, variants, variantColour) {
  const longest = highest(items.map((item) => [...plain(item.heading ?? item.row.variant)].length));
  const left = Math.min(width * 0.4, 16 + 7 * longest);
  const limit = Math.floor((left - 12) / 6.6);
  const layout = baseLayout(width, { xTitle: "difference in points", left });
  const placed = items.map((item, i) => ({ ...item, y: items.length - 1 - i }));
  const traces = variants.flatMap((variant) => {
    const own = placed.filter((item) => item.row?.variant === variant);
    if (!own.length) return [];
    const shade = colour(variantColour(variant));
    const reach = (bound, sign) => own.map(({ row }) => (known(row[bound]) ? 100 * sign * (row[bound] - row.difference) : 0));
    return [{
      type: "scatter", mode: "markers", name: label(variant), x: own.map(({ row }) => 100 * row.difference), y: own.map((item) => item.y),
      marker: { color: shade, size: 8, opacity: 1 },
      error_x: { type: "data", symmetric: false, array: reach("high", 1), arrayminus: reach("low", -1), color: shade, thickness: 1.8, width: 0 },
      text: own.map(({ row }) => `${label(row.agent === "all" ? "mean of the agents" : row.agent, 40)}, ${label(variant, 40)}<br>${points(row.difference)} points${known(row.low) ? ` (${points(row.low)} to ${points(row.high)})` : ""}`),
      hovertemplate: "%{text}<extra></extra>",
    }];
  });
  layout.hovermode = "closest";
  layout.dragmode = false;
  Object.assign(layout.xaxis, { range, showgrid: true, gridcolor: colour("--line") });
  Object.assign(layout.yaxis, { range: [-0.7, items.length - 0.3], showgrid: false, fixedrange: true, tickmode: "array", tickvals: placed.map((item) => item.y),
    ticktext: placed.map((item) => (item.row ? label(item.row.variant, limit) : `<b>${label(item.heading, limit)}</b>`)) });
  layout.shapes.push({ type: "line", x0: 0, x1: 0, yref: "paper", y0: 0, y1: 1, layer: "below", line: { color: colour("--muted"), width: 1.2 } });
  return { traces, layout };
}

function renderAccounting(parent, { study, variantName }) {
  const place = section(parent, "cost", "What it cost", "Means over seeds. Equal rollouts are not equal updates: a learner that sees more rollouts makes more updates.");
  const rows = study.accounting || [];
  if (!rows.length) { place.append(empty("No run is done yet.")); return; }
  const onGpus = rows.some((row) => row.gpu_seconds != null);
  const gpuTime = (cell) => (onGpus ? [cell] : []);
  const anyForward = rows.some((row) => row.tokens_forward);
  const forward = (cell) => (anyForward ? [cell] : []);
  for (const [team, own] of byTeam(study, rows)) {
    place.append(table(["variant", "agent", "rollouts", "tokens sampled", "tokens trained", ...forward("tokens forward"), "updates", "time", ...gpuTime("GPU time"), "sampling", "learning", "memory, GiB"],
      own.flatMap((row) => {
        const agents = (study.agents || []).filter((each) => each.team === team && each.variant === row.variant && each.accounting);
        const costs = (each) => [count(each.rollouts), count(each.tokens), count(each.tokens_trained), ...forward(count(each.tokens_forward)), count(each.updates)];
        return [
          { class: "first", cells: [variantName(row.variant), el("b", {}, "in all"), ...costs(row), duration(row.seconds), ...gpuTime(row.gpu_seconds == null ? "–" : duration(row.gpu_seconds)), "", "", fixed(row.peak_memory_gib, 2)] },
          ...agents.map((each) => [el("span", { class: "hidden" }, String(row.variant)), agentName(each.agent, agentsOf(study, team).indexOf(each.agent)), ...costs(each.accounting), "", ...gpuTime(""), duration(each.accounting.sample_seconds), duration(each.accounting.learn_seconds), fixed(each.accounting.peak_memory_gib, 2)]),
        ];
      }), { className: "grouped", caption: (study.teams || []).length > 1 ? String(team) : undefined, textColumns: 2 }));
  }
}

function renderCurves(parent, { study, variants, variantColour, variantDash }) {
  const place = section(parent, "learning", "Learning curves", "Accuracy on held-out problems: lines are means over the finished seeds, bands go from the lowest to the highest seed.");
  if (!study.curves.length) { place.append(empty("No run with evaluations is done yet.")); return; }
  let axis = "rollouts";
  const drawn = [];
  place.append(choice("Horizontal axis", AXES, (value) => {
    axis = value;
    for (const figure of drawn) if (figure?.drawn) draw(figure, true);
  }));
  place.append(legend(variants.map((variant) => ({ name: variant === study.baseline ? `${variant} (baseline)` : String(variant), colour: variantColour(variant), kind: "line" }))));
  for (const [team, own] of byTeam(study, study.curves)) {
    if ((study.teams || []).length > 1) place.append(el("h3", { class: "team" }, String(team)));
    const grid = place.appendChild(el("div", { class: "figures", vars: { "--least": "380px" } }));
    const agents = [...new Set(own.map((curve) => curve.agent))];
    for (const agent of agents) {
      const curves = variants.map((variant) => own.find((curve) => curve.agent === agent && curve.variant === variant)).filter(Boolean);
      drawn.push(addFigure(grid, {
        title: el("span", {}, agentName(agent, agents.indexOf(agent), "wraps"), (study.teams || []).length > 1 ? ` in ${team}` : ""),
        read: "The higher line at the same place has made more of the same effort.",
        height: 290,
        build: (width, height) => {
          const [unit, xTitle] = axis === "seconds" ? timeUnit(curves.flatMap((curve) => curve.seconds)) : [1, AXIS_TITLES[axis]];
          const x = (curve) => curve[axis].map((value) => value / unit);
          return lineChart({
            lines: curves.map((curve) => ({ name: curve.variant, x: x(curve), y: curve.mean, colour: variantColour(curve.variant), dash: variantDash(curve.variant), markers: curve.mean.length < 25 })),
            bands: curves.filter((curve) => curve.seeds > 1).map((curve) => ({ x: x(curve), low: curve.low, high: curve.high, colour: variantColour(curve.variant), opacity: curves.length > 5 ? 0.07 : 0.13, names: [`${curve.variant}, lowest`, `${curve.variant}, highest`] })),
            xTitle, xFormat: axis === "seconds" ? "~g" : ",",
          })(width, height);
        },
      }));
    }
  }
}

// One run of the study in detail, chosen by team, variant and seed.
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
  const fields = { team: field("team"), variant: field("variant"), seed: field("seed") };
  const shared = there.find((run) => run.data.shares && run.data.agents.length > 1 && run.status === "done") || there[0];
  for (const name of Object.keys(fields)) fields[name].value = String(shared[name]);
  place.append(el("form", { class: "filters", "aria-label": "Choose a run", onsubmit: (event) => event.preventDefault() },
    el("label", {}, "Team", fields.team), el("label", {}, "Variant", fields.variant), el("label", {}, "Seed", fields.seed)), host);
  function show() {
    forget(host);
    const run = there.find((each) => Object.keys(fields).every((name) => String(each[name]) === fields[name].value));
    host.replaceChildren();
    if (!run) { host.append(empty("This run has not begun, or its folder is gone.")); browser = null; return; }
    host.append(el("h3", { class: "chosen" }, `${run.team} · ${run.variant} · seed ${run.seed}`), runFacts(run.data));
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
