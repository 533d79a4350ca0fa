// The sections of one run.

const AXES = [["rollouts", "Rollouts"], ["updates", "Updates"], ["seconds", "Time"], ["step", "Step"]];
const AXIS_TITLES = { rollouts: "rollouts sampled, all agents", updates: "updates of the agent", step: "step" };

// Seconds as seconds, or as minutes or hours where these are many.
function timeUnit(seconds) {
  const most = highest(seconds.filter(known));
  return most < 180 ? [1, "seconds of training"] : most < 3 * 3600 ? [60, "minutes of training"] : [3600, "hours of training"];
}

const others = (run, learner) => run.sources.map((source, j) => ({ ...source, index: j })).filter((source) => source.id !== learner.id);

function whyNothingIsShown(run) {
  if (run.sources.length < 2) return "This run has one agent: nothing is shared.";
  if (!run.shares) return `Under ${run.algorithm} others' rollouts have no term in what an agent maximises: there is no ratio or weight to show.`;
  if (!run.series.step) return "No step has been logged yet.";
  return null;
}

// Why a foreign rollout with an advantage may teach nothing; null where each of them teaches.
const leavesOut = (run) => run.explanation.band || run.explanation.wrong_filter;
const always = (lists, value) => lists.flat().every((each) => !known(each) || each === value);
const sentences = (...parts) => parts.filter(Boolean).join(" ");

function runFacts(run) {
  const { totals, agents } = run;
  const steps = run.finished || !known(run.max_steps) ? plural(totals.steps, "step") : `${count(totals.steps)} of ${count(run.max_steps)} steps so far`;
  const facts = [
    [run.algorithm.toUpperCase()], [plural(agents.length, "agent")], [run.task], [steps],
    [known(totals.rollouts) ? plural(totals.rollouts, "rollout") : null],
    [known(totals.wall_seconds) ? duration(totals.wall_seconds) : known(totals.seconds) ? duration(totals.seconds) : null],
    [run.seed === null || run.seed === undefined ? null : `seed ${run.seed}`],
  ];
  return el("ul", { class: "facts" }, facts.filter(([fact]) => fact).map(([fact], i) => el("li", {}, i ? fact : el("b", {}, fact))));
}

function renderRun(parent, run) {
  renderResult(parent, run);
  renderLearning(parent, run);
  renderCapability(parent, run);
  renderOverlap(parent, run);
  renderKept(parent, run);
  renderMatrix(parent, run);
  renderCosine(parent, run);
  renderTime(parent, run);
  renderLost(parent, run);
}

// --- result and learning curves --------------------------------------------------------------------

function renderResult(parent, run) {
  const place = section(parent, "result", "Result", "Accuracy on held-out problems, greedy answers, before and after training.");
  if (run.agents.some((agent) => known(agent.final))) {
    place.append(el("div", { class: "cards" }, run.agents.map((agent, i) => {
      const best = known(agent.best) && agent.best > agent.final ? `, best ${fixed(agent.best)} at step ${agent.best_step}` : "";
      return el("div", { class: "card", vars: { "--own": `var(${agentColour(i)})` } },
        el("h3", {}, agent.id), el("p", { class: "model" }, agent.model),
        el("div", { class: "figure" }, el("small", {}, `${fixed(agent.start)} → `), fixed(agent.final)),
        el("p", { class: "gain" }, el("b", {}, `${points(agent.final - agent.start)} points`), best),
        sparkline(run.evals[agent.id]));
    })));
  } else place.append(empty("No accuracy: this run has no held-out problems, or has not come to its first evaluation."));
  const forward = (cell) => (run.totals.tokens_forward ? [cell] : []);
  const head = ["agent", "start", "final", "best", "rollouts", "tokens sampled", "tokens trained", ...forward("tokens forward"), "updates", "sampling", "learning", "memory, GiB"];
  const costs = (row) => [count(row.rollouts), count(row.tokens), count(row.tokens_trained), ...forward(count(row.tokens_forward)), count(row.updates)];
  const rows = run.agents.map((agent, i) => [
    agentName(agent.id, i), fixed(agent.start), fixed(agent.final),
    known(agent.best) ? [fixed(agent.best), el("span", { class: "when" }, ` (step ${agent.best_step})`)] : NONE,
    ...costs(agent), duration(agent.sample_seconds), duration(agent.learn_seconds), fixed(agent.peak_memory_gib, 2),
  ]);
  rows.push({ class: "total", cells: ["in all", "", "", known(run.totals.best_step) ? `step ${run.totals.best_step}` : "", ...costs(run.totals), { text: duration(run.totals.seconds), class: "" }, "", fixed(run.totals.peak_memory_gib, 2)] });
  place.append(table(head, rows, { className: "costs" }));
  place.append(el("p", { class: "small" }, "Sampling and learning are seconds of each agent; agents may work at the same time. In all: the whole time of the run."));
  renderSources(place, run);
  renderDecisions(place, [run]);
}

// What the sources gave that are no agents, and what that cost.
function renderSources(place, run) {
  const given = run.sources.slice(run.agents.length);
  if (!given.length) return;
  const head = ["source", "rollouts", "mean reward", "prompts asked", "with an answer in store", "without log-probs", "requests", "failed", "late", "not sent", "prompt tokens", "answer tokens", "latency"];
  const rows = given.map((source, j) => [agentName(source.id, run.agents.length + j), count(source.rollouts), fixed(source.reward), count(source.prompts), known(source.joined) ? percent(source.joined) : NONE, count(source.without_logps), count(source.requests), count(source.failed), count(source.late), count(source.not_sent), count(source.prompt_tokens), count(source.answer_tokens), known(source.latency) ? duration(source.latency) : NONE]);
  place.append(table(head, rows, { caption: "Sources that are no agents" }));
}

// What is our choice in the algorithms of these runs, each said once.
function renderDecisions(place, runs) {
  for (const told of new Set(runs.flatMap((run) => [run.explanation.imitation, run.explanation.decision]).filter(Boolean))) place.append(el("p", { class: "decision" }, told));
}

// An agent's accuracy in a corner of its card; the chart below has the numbers.
function sparkline(evals) {
  if (!evals || evals.accuracy.length < 3) return null;
  const [low, high, last] = [lowest(evals.accuracy), highest(evals.accuracy), evals.step.at(-1)];
  const path = evals.accuracy.map((y, i) => `${i ? "L" : "M"}${((100 * evals.step[i]) / last).toFixed(1)} ${(36 - (32 * (y - low)) / (high - low || 1)).toFixed(1)}`).join("");
  return el("svg:svg", { class: "spark", viewBox: "0 0 100 40", preserveAspectRatio: "none", "aria-hidden": "true" },
    el("svg:path", { class: "area", d: `${path}L100 40L0 40Z` }), el("svg:path", { d: path }));
}

function stepAxis(run, axis, agent) {
  const { series } = run;
  if (axis === "rollouts") return sums(run.agents.map((each) => series[`${each.id}/num_rollouts`]));
  if (axis === "updates") return series[`${agent.id}/num_updates`];
  return axis === "seconds" ? series.elapsed : series.step;
}

function sums(lists) {
  const there = lists.filter(Boolean);
  return there.length ? there[0].map((_, i) => there.reduce((sum, values) => sum + (values[i] || 0), 0)) : undefined;
}

function renderLearning(parent, run) {
  const place = section(parent, "learning", "Learning curves", "How far the agents came, and what it took. Compare at equal rollouts, equal updates or equal time.");
  let axis = "rollouts";
  const drawn = [];
  place.append(choice("Horizontal axis", AXES, (value) => {
    axis = value;
    for (const figure of drawn) if (figure?.drawn) draw(figure, true);
  }));
  const grid = place.appendChild(el("div", { class: "figures" }));
  const scaled = (lines) => {
    const [unit, title] = axis === "seconds" ? timeUnit(lines.flatMap((line) => line.x)) : [1, AXIS_TITLES[axis]];
    return { lines: lines.map((line) => ({ ...line, x: line.x.map((x) => x / unit) })), xTitle: title };
  };
  const tested = run.agents.filter((agent) => run.evals[agent.id]);
  drawn.push(addFigure(grid, {
    title: "Accuracy on held-out problems",
    read: "Higher is better; a line that falls has forgotten something.",
    height: 330,
    blank: tested.length ? null : "No evaluation has been logged: this run has no held-out problems, or has just begun.",
    build: (width, height) => lineChart({
      ...scaled(run.agents.flatMap((agent, i) => {
        const evals = run.evals[agent.id];
        return evals ? [{ name: agent.id, x: evals[axis], y: evals.accuracy, colour: agentColour(i), markers: true, weight: 2.5 }] : [];
      })),
      xFormat: axis === "seconds" ? "~g" : ",",
    })(width, height),
  }));
  drawn.push(addFigure(grid, {
    title: "Mean reward of sampled rollouts",
    read: "The training signal, smoothed; thin lines are single steps. It should rise, and keeps some spread from sampling.",
    height: 330,
    blank: run.agents.some((agent) => run.series[`${agent.id}/reward`]) ? null : "No step has been logged yet.",
    build: (width, height) => lineChart({
      ...scaled(run.agents.flatMap((agent, i) => {
        const [x, y] = [stepAxis(run, axis, agent), run.series[`${agent.id}/reward`]];
        return x && y ? [{ name: agent.id, x, y: smooth(y), raw: y, colour: agentColour(i) }] : [];
      })),
      xFormat: axis === "seconds" ? "~g" : ",",
    })(width, height),
  }));
  if (run.merged > 1) place.append(el("p", { class: "small" }, `In the charts by step each point is the mean of ${run.merged} steps.`));
}

// --- capability and coefficient --------------------------------------------------------------------

function renderCapability(parent, run) {
  const { capability, omega } = run.explanation;
  const reason = whyNothingIsShown(run);
  const place = section(parent, "capability", "Capability", sentences("How able the agents are while they train.", reason ? null : omega));
  const grid = place.appendChild(el("div", { class: "figures", vars: { "--least": "340px" } }));
  const there = run.agents.some((agent) => run.series[`${agent.id}/capability`]);
  addFigure(grid, {
    title: "Capability C",
    read: capability,
    blank: there ? null : "This run has logged no capability.",
    build: lineChart({
      lines: run.agents.flatMap((agent, i) => {
        const y = run.series[`${agent.id}/capability`];
        return y ? [{ name: agent.id, x: run.series.step, y, colour: agentColour(i) }] : [];
      }),
      xTitle: "step",
    }),
  });
  if (reason) place.append(empty(reason));
  if (reason || !omega) return;
  run.agents.forEach((learner, k) => {
    const lines = others(run, learner).flatMap((source) => {
      const y = run.series[`${learner.id}/from_${source.id}/omega`];
      return y ? [{ name: source.id, x: run.series.step, y, colour: agentColour(source.index) }] : [];
    });
    addFigure(grid, {
      title: el("span", {}, "ω of the sources of ", agentName(learner.id, k, "wraps")),
      blank: lines.length ? null : "This run has logged no coefficient.",
      build: lineChart({ lines, rules: [{ y: 1 }], xTitle: "step", ratios: true }),
    });
  });
}

// --- the ratio and the clip ------------------------------------------------------------------------

function renderOverlap(parent, run) {
  const { ratio, weight, band } = run.explanation;
  const reason = whyNothingIsShown(run);
  const place = section(parent, "overlap", "The ratio s of others' rollouts", reason ? "How likely a learner finds the others' rollouts." : sentences(ratio, weight, "Rollouts with A = 0 are not counted."));
  if (reason) { place.append(empty(reason)); return; }
  place.append(legend([
    { name: "median", colour: "--muted", kind: "line" }, { name: "middle half and 5 to 95% of the rollouts", colour: "--strong-line" },
    ...(band ? [{ name: "band, mean of the step", colour: "--ink", kind: "line dash" }] : []),
  ]));
  const name = (learner, source, metric) => run.series[`${learner.id}/from_${source.id}/${metric}`];
  const pairs = run.agents.flatMap((learner, k) => others(run, learner).map((source) => ({ learner, source, k })));
  const all = (...metrics) => pairs.flatMap(({ learner, source }) => metrics.flatMap((metric) => name(learner, source, metric) || [])).filter(known);
  const tops = all("ratio_q95", ...(band ? ["upper_mean"] : []));
  const bottoms = all("ratio_q05", ...(band ? ["lower_mean"] : []));
  const range = [Math.max(0, lowest(bottoms) - 0.05), Math.min(2, Math.max(1, highest(tops)) + 0.05)];
  const grid = place.appendChild(el("div", { class: "figures", vars: { "--least": pairs.length > 4 ? "280px" : "400px" } }));
  for (const { learner, source, k } of pairs) {
    const x = run.series.step;
    const shade = agentColour(source.index);
    const [q05, q25, q50, q75, q95] = ["05", "25", "50", "75", "95"].map((q) => name(learner, source, `ratio_q${q}`));
    const [lower, upper] = ["lower_mean", "upper_mean"].map((metric) => band && name(learner, source, metric));
    const bands = [];
    if (q05 && q95) bands.push({ x, low: q05, high: q95, colour: shade, opacity: 0.16, names: ["5%", "95%"] });
    if (q25 && q75) bands.push({ x, low: q25, high: q75, colour: shade, opacity: 0.32, names: ["25%", "75%"] });
    const bound = (y, text) => ({ name: text, x, y, colour: "--ink", dash: "4px,3px", weight: 1.2, labelled: false });
    const lines = [...(lower ? [bound(lower, "band, lower")] : []), ...(upper ? [bound(upper, "band, upper")] : [])];
    if (q50) lines.push({ name: "median", x, y: q50, colour: shade, labelled: false });
    addFigure(grid, {
      title: el("span", {}, agentName(learner.id, k, "wraps"), " learns from ", agentName(source.id, source.index, "wraps")),
      read: overlapSentence(q50, leavesOut(run) ? name(learner, source, "kept") : null),
      height: pairs.length > 4 ? 210 : 250,
      blank: !q50 ? "No rollout of this source was compared: all had advantage 0, or all were dropped." : always([q05, q50, q95], 1) ? "s was 1 for every rollout." : null,
      build: lineChart({ lines, bands, range, rules: [{ y: 1 }], xTitle: "step", format: ".2~f" }),
    });
  }
}

function overlapSentence(medians, kept) {
  const late = (values) => (values || []).slice(-10).filter(known);
  const mean = (values) => (values.length ? values.reduce((a, b) => a + b) / values.length : null);
  const [middle, share] = [mean(late(medians)), mean(late(kept))];
  return `Last steps: median ${fixed(middle, 2)}${known(share) ? `, ${percent(share)} of the rollouts kept` : ""}.`;
}

function renderKept(parent, run) {
  const { band } = run.explanation;
  const reason = whyNothingIsShown(run);
  if (!reason && !leavesOut(run)) return; // every rollout with an advantage is kept
  const shown = band ? [["kept_positive", "right", "solid"], ["kept_negative", "wrong", "5px,3px"]] : [["kept_negative", "wrong", "5px,3px"]];
  const which = band ? "right ones (A > 0, solid) and wrong ones (A < 0, dashed)" : "wrong ones (A < 0); right ones (A > 0) are always kept";
  const place = section(parent, "kept", "What was kept", reason ? "How much of the others' rollouts a learner uses." : sentences(leavesOut(run), `Shown is the share that was kept: ${which}.`));
  if (reason) { place.append(empty(reason)); return; }
  const grid = place.appendChild(el("div", { class: "figures", vars: { "--least": "400px" } }));
  run.agents.forEach((learner, k) => {
    const lines = others(run, learner).flatMap((source) => shown.flatMap(([metric, word, dash]) => {
      const y = run.series[`${learner.id}/from_${source.id}/${metric}`];
      const many = run.sources.length > 2;
      const name = many ? `${source.id}${word === shown[0][1] ? "" : ", wrong"}` : word;
      return y ? [{ name, x: run.series.step, y: smooth(y), raw: many ? null : y, colour: agentColour(source.index), dash, labelled: !many || word === shown[0][1], weight: word === "right" ? 2.2 : 1.4 }] : [];
    }));
    addFigure(grid, {
      title: el("span", {}, agentName(learner.id, k, "wraps"), " keeps of ", run.sources.length > 2 ? "the others" : agentName(others(run, learner)[0].id, others(run, learner)[0].index, "wraps")),
      read: "At 100% all of them teach the learner, at 0% none does.",
      blank: !lines.length ? "No foreign rollout with an advantage was logged." : always(lines.map((line) => line.y), 1) ? "All of them were kept." : null,
      build: lineChart({ lines, xTitle: "step", range: [-0.03, 1.03], format: ".0%" }),
    });
  });
}

// --- who learned from whom -------------------------------------------------------------------------

function renderMatrix(parent, run) {
  const place = section(parent, "sources", "Who learned from whom", "The share of each source in what a learner maximises: the sum of |weight × advantage| of the rollouts that were kept, each as it counts in its mean.");
  const reason = whyNothingIsShown(run);
  if (reason) { place.append(empty(reason)); return; }
  const whole = run.agents.map((learner) => run.sources.reduce((sum, source) => sum + (run.mass[learner.id][source.id] || 0), 0));
  if (!whole.some((sum) => sum > 0)) { place.append(empty("No gradient mass was logged: no rollout had an advantage and was kept.")); return; }
  const grid = place.appendChild(el("div", { class: "figures", vars: { "--least": run.sources.length > 2 ? "400px" : "320px" } }));
  grid.append(el("figure", { class: run.sources.length > 2 ? "whole" : null }, el("figcaption", {}, el("h3", {}, "Over the whole run"),
    el("p", { class: "read" }, "Read along a row: where a learner's lessons came from. The diagonal is what it learned from itself; a row with nothing beside it has not used the others.")),
    el("div", { class: "scroll" }, el("table", { class: "matrix" },
      el("caption", { class: "hidden" }, "Share of each source in the gradient mass of each learner"),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "learner ↓", el("br"), "source →"), run.sources.map((source, j) => el("th", { scope: "col" }, agentName(source.id, j))))),
      el("tbody", {}, run.agents.map((learner, k) => el("tr", {}, el("th", { scope: "row" }, agentName(learner.id, k)), run.sources.map((source, j) => {
        const share = whole[k] ? (run.mass[learner.id][source.id] || 0) / whole[k] : null;
        return el("td", { class: j === k ? "self" : null, vars: { "--own": `var(${agentColour(j)})`, "--share": String(share || 0) } }, percent(share));
      }))))))));
  run.agents.forEach((learner, k) => {
    const masses = run.sources.map((source) => smooth(run.series[source.id === learner.id ? `${learner.id}/gradient_mass` : `${learner.id}/from_${source.id}/gradient_mass`] || run.series.step.map(() => 0)));
    if (always(masses.filter((_, j) => j !== k), 0)) {
      grid.append(el("figure", {}, empty(`${learner.id} used no rollout of others.`)));
      return;
    }
    const sum = sums(masses);
    const parts = run.sources.map((source, j) => ({ name: source.id, x: run.series.step, colour: agentColour(j), y: masses[j].map((mass, i) => (sum[i] ? (mass || 0) / sum[i] : 0)) }));
    addFigure(grid, {
      title: el("span", {}, "Sources of ", agentName(learner.id, k, "wraps"), " over time"),
      read: "The part of a source shrinks when fewer of its rollouts are kept, when they count for less, or when another part grows.",
      height: 230, legend: legend(parts),
      build: stackChart({ parts, xTitle: "step", format: ".0%", range: [0, 1] }),
    });
  });
}

function renderCosine(parent, run) {
  const place = section(parent, "agreement", "Do the gradients agree?", "The angle between what an agent's own rollouts and the others' rollouts would do to its weights.");
  const reason = whyNothingIsShown(run);
  const lines = run.agents.flatMap((agent, i) => {
    const y = run.series[`${agent.id}/grad_cosine`];
    return y ? [{ name: agent.id, x: run.series.step, y: smooth(y), raw: y, colour: agentColour(i) }] : [];
  });
  addFigure(place, {
    title: "Cosine of own and foreign gradient",
    read: reason ? null : "Above 0 the others push the same way as the agent's own rollouts; lasting values below 0 mean that they work against it.",
    blank: reason || (lines.length ? null : "No step had both an own and a foreign gradient."),
    build: lineChart({ lines, rules: [{ y: 0 }], xTitle: "step", zero: true, format: ".2~f" }),
  });
}

// --- time and losses -------------------------------------------------------------------------------

function renderTime(parent, run) {
  const place = section(parent, "time", "Time", "What the seconds of a step went to. Where agents work at the same time, a phase takes as long as its slowest agent.");
  const phases = ["sampling", "verifying", "learning", "evaluating", "other"];
  const parts = phases.flatMap((phase, i) => {
    const y = run.series[`phase/${phase}`];
    return y && y.some((value) => value > 0) ? [{ name: phase, x: run.series.step, y, colour: `--phase-${i}` }] : [];
  });
  const whole = parts.map((part) => part.y.reduce((a, b) => a + b, 0));
  const sum = whole.reduce((a, b) => a + b, 0);
  addFigure(place, {
    title: "Seconds of each step by phase",
    read: parts.length ? `In all ${list(parts.map((part, i) => `${part.name} ${percent(whole[i] / sum)}`))}. Level columns are good; growing ones mean longer answers or a machine that is shared.` : "",
    legend: legend(parts),
    blank: parts.length ? null : "No step has been timed yet.",
    build: parts.length ? stackChart({ parts, xTitle: "step", format: ".3~g" }) : null,
  });
}

function renderLost(parent, run) {
  const place = section(parent, "lost", "Rollouts that were lost", "Unverified: the verifier gave no reward, so nobody could use the rollout. Dropped: one learner could not read it in its own tokens. Few is good; many deserve a look at the reasons.");
  if (!run.series.step) { place.append(empty("No step has been logged yet.")); return; }
  if (!run.lost.length) { place.append(empty("None: every rollout was verified, and every learner could use all it was given.")); return; }
  const index = (id) => run.sources.findIndex((source) => source.id === id);
  const sampled = (id) => run.sources[index(id)]?.rollouts;
  const rows = run.lost.map((loss) => [
    agentName(loss.source, index(loss.source)), loss.learner ? agentName(loss.learner, index(loss.learner)) : "everybody",
    `${loss.learner ? "dropped" : "unverified"}: ${loss.reason.replaceAll("_", " ")}`, count(loss.count),
    sampled(loss.source) ? `${(100 * loss.count / sampled(loss.source)).toFixed(2)}%` : NONE,
  ]);
  place.append(table(["rollouts of", "lost to", "reason", "rollouts", "share of the source's"], rows, { textColumns: 3 }));
  const parts = Object.keys(run.series).filter((name) => name.startsWith("lost/")).map((name, i) => ({ name: name.slice(5).replaceAll("_", " "), x: run.series.step, y: run.series[name], colour: `--variant-${(i + 1) % 8}` }));
  if (parts.length) addFigure(place, { title: "Lost rollouts of each step", read: "A sudden rise points to answers that became too long, or to a verifier in trouble.", height: 220, legend: legend(parts), build: stackChart({ parts, xTitle: "step", format: "~g" }) });
}

function renderSettings(parent, run) {
  const place = section(parent, "settings", "Settings");
  place.classList.add("screen");
  place.append(el("details", { class: "settings" }, el("summary", {}, "config.yaml, as the run resolved it"), el("pre", { tabindex: "0" }, run.config)));
}
