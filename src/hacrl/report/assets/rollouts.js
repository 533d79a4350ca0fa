// The rollout browser: a step is unpacked when it is looked at. All agents' answers to one prompt stand side by side.

const KEPT_STEPS = 8;
let browser = null;

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// The rollouts of one step by prompt: [{step, position, text, cut, answers}].
function groupsOf(step, data) {
  const groups = data.prompts.map(([text, cut], position) => ({ step, position, text, cut, answers: [] }));
  for (const [prompt, source, index, text, cut, reward, finish, tokens, logp, remark, uses] of data.rollouts) {
    groups[prompt].answers.push({ source: data.sources[source], index, text, cut, reward, finish, tokens, logp, remark, uses });
  }
  return groups;
}

const REWARDS = {
  any: () => true,
  right: (reward) => reward !== null && reward > 0,
  wrong: (reward) => reward !== null && reward <= 0,
  unverified: (reward) => reward === null,
};

function renderRollouts(parent, run, index, packed, maxMb) {
  const place = section(parent, "rollouts", "Rollouts", "What the agents wrote. Beside each answer stands what every learner made of it: the ratio s, the advantage A, and whether the rollout was kept.");
  const { ratio, own_weight: ownWeight, weight } = run.explanation;
  place.append(el("p", { class: "small" }, sentences(ratio, ownWeight, ...(whyNothingIsShown(run) ? [] : [weight, leavesOut(run)]))));
  browser = null;
  if (!packed.of) { place.append(empty("This run has no rollouts yet.")); return; }
  if (packed.steps.length < packed.of) {
    const some = packed.steps.length ? `This file has the rollouts of ${packed.steps.length} of ${packed.of} steps, evenly spread` : `This file has no room for the rollouts of this run`;
    place.append(el("p", { class: "small" }, `${some}; the rest is left out to stay below ${maxMb} MB. \`hacrl report --max-mb\` makes more room, \`hacrl rollouts RUN --step N\` shows any step.`));
    if (!packed.steps.length) return;
  }
  if (typeof DecompressionStream === "undefined") {
    place.append(empty("This browser cannot unpack the rollouts. Any of 2023 or later can."));
    return;
  }

  const cache = new Map();
  async function groups(step) {
    if (!cache.has(step)) {
      cache.set(step, groupsOf(step, await unpack(document.getElementById(`rollouts-${index}-${step}`).textContent)));
      if (cache.size > KEPT_STEPS) cache.delete(cache.keys().next().value);
    }
    return cache.get(step);
  }

  const option = (value, text = value) => el("option", { value }, String(text));
  const stepField = el("select", { name: "step" }, option("all", "all steps"), packed.steps.map((step) => option(step)));
  stepField.value = String(packed.steps.at(-1));
  const agentField = el("select", { name: "agent" }, option("", "all sources"), run.sources.map((source) => option(source.id)));
  const rewardField = el("select", { name: "reward" }, [["any", "any"], ["right", "right (above 0)"], ["wrong", "wrong (0 or below)"], ["unverified", "unverified"], ["range", "between …"]].map(([value, text]) => option(value, text)));
  const lowField = el("input", { type: "number", name: "low", step: "any", value: "0" });
  const highField = el("input", { type: "number", name: "high", step: "any", value: "1" });
  const range = [el("label", { hidden: true }, "from", lowField), el("label", { hidden: true }, "to", highField)];
  const searchField = el("input", { type: "search", name: "search", placeholder: "in prompts and answers", autocomplete: "off", spellcheck: "false" });
  const filters = el("form", { class: "filters", role: "search", "aria-label": "Filter the rollouts", onsubmit: (event) => event.preventDefault() },
    el("label", {}, "Step", stepField), el("label", {}, "Agent", agentField), el("label", {}, "Reward", rewardField), range, el("label", { class: "wide" }, "Search", searchField));
  const position = el("output", { "aria-live": "polite" });
  const back = el("button", { type: "button", onclick: () => move(-1), "aria-keyshortcuts": "ArrowLeft" }, "← Previous");
  const forth = el("button", { type: "button", onclick: () => move(1), "aria-keyshortcuts": "ArrowRight" }, "Next →");
  const view = el("div", { class: "group" });
  place.append(filters, el("div", { class: "pager" }, back, forth, position), view);

  let matches = [], at = 0, searching = 0, busy = false;
  const agents = () => (agentField.value ? [agentField.value] : run.sources.map((source) => source.id));

  function fits(answer) {
    if (agentField.value && answer.source !== agentField.value) return false;
    if (rewardField.value !== "range") return REWARDS[rewardField.value](answer.reward);
    const [low, high] = [lowField.valueAsNumber, highField.valueAsNumber];
    return answer.reward !== null && !(answer.reward < low) && !(answer.reward > high);
  }

  function matching(group) {
    const wanted = searchField.value.toLowerCase();
    const told = (text) => text.toLowerCase().includes(wanted);
    const chosen = group.answers.filter(fits);
    return chosen.length > 0 && (!wanted || told(group.text) || chosen.some((answer) => told(answer.text)));
  }

  // Goes through the chosen steps; a newer search ends an older one.
  async function search() {
    const mine = ++searching;
    const steps = stepField.value === "all" ? packed.steps : [Number(stepField.value)];
    matches = []; at = 0; busy = true;
    let shown = false;
    for (const step of steps) {
      const found = (await groups(step)).filter(matching);
      if (mine !== searching) return;
      matches.push(...found.map((group) => [step, group.position]));
      if (!shown && matches.length) { shown = true; await show(); } else tell();
    }
    busy = false;
    if (!matches.length) view.replaceChildren(empty("Nothing fits these filters."));
    tell();
  }

  function tell() {
    const found = matches.length ? `Prompt ${count(at + 1)} of ${count(matches.length)} · step ${matches[at][0]}, prompt ${matches[at][1]}` : "No prompt";
    position.textContent = busy ? `${found} · searching …` : found;
    back.disabled = at <= 0;
    forth.disabled = at >= matches.length - 1;
  }

  async function show() {
    const [step, which] = matches[at];
    const mine = searching;
    const group = (await groups(step))[which];
    if (mine !== searching) return;
    view.replaceChildren(...renderGroup(run, group, agents(), fits, searchField.value));
    tell();
  }

  function move(by) {
    const next = at + by;
    if (next < 0 || next >= matches.length) return;
    at = next;
    show();
  }

  let pause = 0;
  const changed = () => {
    for (const label of range) label.hidden = rewardField.value !== "range";
    clearTimeout(pause);
    pause = setTimeout(search, 150);
  };
  for (const event of ["input", "change"]) filters.addEventListener(event, changed);
  browser = { place, move };
  // The first step is unpacked when somebody comes near.
  const near = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    near.disconnect();
    search();
  }, { rootMargin: "400px" });
  ready.then(() => near.observe(place));
}

function renderGroup(run, group, agents, fits, search) {
  const prompt = el("div", { class: "prompt" }, el("p", { class: "eyebrow" }, "Prompt"), modelText(group.text, search), cutNote(group.cut));
  const index = (id) => run.sources.findIndex((source) => source.id === id);
  const columns = agents.map((id) => {
    const answers = group.answers.filter((answer) => answer.source === id);
    const right = answers.filter((answer) => REWARDS.right(answer.reward)).length;
    return el("div", { class: "column", vars: { "--own": `var(${agentColour(index(id))})` } },
      el("h3", {}, agentName(id, index(id), "wraps"), el("small", {}, `${right} of ${answers.length} right`)),
      answers.length ? answers.map((answer) => renderAnswer(run, answer, fits(answer), search)) : empty("No rollout for this prompt."));
  });
  return [prompt, el("div", { class: "columns", vars: { "--count": String(columns.length) } }, columns)];
}

function renderAnswer(run, answer, fitting, search) {
  const { reward } = answer;
  const [word, kind] = reward === null ? ["? unverified", "unsure"] : reward > 0 ? [`✓ ${Number(reward.toPrecision(4))}`, "right"] : [`✗ ${Number(reward.toPrecision(4))}`, "wrong"];
  return el("article", { class: fitting ? "answer" : "answer other" },
    el("header", {},
      el("span", { class: `verdict ${kind}` }, word),
      el("span", {}, plural(answer.tokens, "token")),
      el("span", { title: "mean log-probability of a token when it was sampled" }, `log-prob ${fixed(answer.logp)} / token`),
      answer.finish === "length" ? el("span", { class: "verdict unsure" }, "cut off at the limit") : null),
    modelText(answer.text, search), cutNote(answer.cut),
    answer.remark ? el("p", { class: "remark" }, answer.remark) : null,
    renderUses(run, answer));
}

const cutNote = (cut) => (cut ? el("p", { class: "remark" }, `… ${plural(cut, "more character")}, left out of this file`) : null);

// What each learner made of a rollout.
function renderUses(run, answer) {
  const rows = run.agents.flatMap((learner, k) => {
    const use = answer.uses[learner.id];
    if (use === undefined || use === null) return [];
    const name = agentName(learner.id, k);
    if (typeof use === "string") return [el("li", { class: "plainly" }, name, el("span", {}, `dropped: ${use.replaceAll("_", " ")}`))];
    const [advantage, ratio, lower, upper, kept, weight] = use;
    if (!known(ratio)) return [el("li", { class: "plainly" }, name, el("span", {}, advantage === 0 ? "A 0: nothing to learn" : `A ${fixed(advantage, 2)}`))];
    const band = known(upper) ? `, band ${fixed(lower, 4)} to ${fixed(upper, 4)}` : "";
    const worth = `A ${advantage > 0 ? "+" : ""}${fixed(advantage, 2)}`;
    return [el("li", { title: `${learner.id}: ${worth}, weight ${fixed(weight)}${band}` }, name, gauge(ratio, lower, upper, k),
      el("span", {}, `s ${fixed(ratio)}`), el("span", { class: "worth" }, worth),
      el("span", { class: kept ? "verdict right" : "verdict" }, kept ? "kept" : "left out"))];
  });
  return rows.length ? el("ul", { class: "uses", "aria-label": "What each learner made of it" }, rows) : null;
}

// s on a line from 0.5 to 1.2, with the band where there is one.
function gauge(ratio, lower, upper, learner) {
  const at = (value) => 2 + 80 * (Math.min(Math.max(value, 0.5), 1.2) - 0.5) / 0.7;
  const [from, to] = [at(lower), at(upper)];
  return el("svg:svg", { class: "gauge", viewBox: "0 0 84 12", "aria-hidden": "true", vars: { "--own": `var(${agentColour(learner)})` } },
    el("svg:line", { class: "track", x1: 2, x2: 82, y1: 6, y2: 6 }),
    known(upper) ? el("svg:rect", { class: "band", x: from, y: 1.5, width: Math.max(to - from, 1.5), height: 9, rx: 1.5 }) : null,
    el("svg:line", { class: "needle", x1: at(ratio), x2: at(ratio), y1: 0.5, y2: 11.5 }));
}

addEventListener("keydown", (event) => {
  if (!browser || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
  if (event.target instanceof Element && event.target.closest("input, select, textarea, [role=region]")) return;
  const { top, bottom } = browser.place.getBoundingClientRect();
  if (top > innerHeight || bottom < 0) return;
  if (event.key === "ArrowLeft") browser.move(-1);
  if (event.key === "ArrowRight") browser.move(1);
});
