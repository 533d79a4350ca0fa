// Charts: drawn when they come into view, again when the theme or the width changes, all of them for printing.

const root = document.documentElement;
// Text and tables are there before Plotly and the rollouts, which come last in the file, have been read.
const ready = new Promise((resolve) => addEventListener("DOMContentLoaded", resolve));
const figures = new Set();
const inView = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) draw(entry.target.figure);
}, { rootMargin: "250px" });
const resized = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const figure = entry.target.figure;
    if (figure.drawn && Math.abs(entry.contentRect.width - figure.width) > 1) draw(figure, true);
  }
});

const colour = (variable) => getComputedStyle(root).getPropertyValue(variable).trim();

function fade(hex, opacity) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  return `rgba(${r},${g},${b},${opacity})`;
}

// Plotly reads tags in labels: names must not have any.
function label(text, limit = 28) {
  const short = [...plain(text)];
  const cut = short.length > limit ? short.slice(0, limit - 1).join("") + "…" : short.join("");
  return cut.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

// A figure: a title, a sentence on how to read it, the chart, and its numbers. `build` gives {traces, layout}.
function addFigure(parent, { title, read, build, height = 270, blank = null, legend = null, numbered = true }) {
  const name = typeof title === "string" ? title : title.textContent;
  const plot = el("div", { class: "plot waiting", role: "img", "aria-label": `${name}. ${read || ""}` });
  const node = el("figure", {}, el("figcaption", {}, el("h3", {}, title), read ? el("p", { class: "read" }, read) : null), legend);
  parent.append(node);
  if (blank) {
    node.append(empty(blank));
    return null;
  }
  const figure = { plot, build, height, drawn: false, width: 0 };
  plot.figure = figure;
  plot.style.minHeight = `${height}px`;
  node.append(plot);
  if (numbered) {
    const numbers = node.appendChild(el("details", { class: "numbers" }, el("summary", {}, "Numbers")));
    numbers.addEventListener("toggle", () => { if (numbers.open) showNumbers(numbers, figure); });
  }
  figures.add(figure);
  ready.then(() => { inView.observe(plot); resized.observe(plot); });
  return figure;
}

function draw(figure, again = false) {
  if (figure.drawn && !again) return;
  const width = figure.plot.clientWidth;
  if (!width) return;
  figure.width = width;
  figure.drawn = true;
  figure.plot.classList.remove("waiting");
  const { traces, layout } = figure.build(width, figure.height);
  Plotly.react(figure.plot, traces, { ...layout, width, height: figure.height }, { displayModeBar: false, scrollZoom: false });
}

const redraw = () => { for (const figure of figures) if (figure.drawn) draw(figure, true); };

function forget(parent) {
  for (const figure of [...figures]) {
    if (!parent.contains(figure.plot)) continue;
    inView.unobserve(figure.plot);
    resized.unobserve(figure.plot);
    if (figure.drawn) Plotly.purge(figure.plot);
    figures.delete(figure);
  }
}

function showNumbers(details, figure) {
  details.querySelector(".scroll")?.remove();
  const { traces, layout } = figure.build(600, figure.height);
  const shown = traces.filter((trace) => trace.meta);
  const xs = [...new Set(shown.flatMap((trace) => trace.x))].sort((a, b) => a - b);
  const columns = shown.map((trace) => new Map(trace.x.map((x, i) => [x, trace.y[i]])));
  const short = (value) => (known(value) ? minus(String(Number(value.toPrecision(4)))) : NONE);
  details.append(table([layout.meta || "x", ...shown.map((trace) => trace.meta)], xs.map((x) => [short(x), ...columns.map((column) => short(column.get(x)))])));
}

const AXIS = { fixedrange: false, zeroline: false, automargin: false };

function baseLayout(width, { xTitle = "", right = 14, left = 46, bottom = 42 }) {
  const phone = width < 480;
  const muted = colour("--muted");
  return {
    meta: xTitle,
    font: { family: colour("--sans"), size: 12, color: muted },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: left, r: right, t: 10, b: bottom },
    showlegend: false, hovermode: "x unified", dragmode: phone ? false : "zoom", autosize: false,
    hoverlabel: { bgcolor: colour("--surface"), bordercolor: colour("--strong-line"), font: { family: colour("--sans"), size: 12, color: colour("--ink") }, namelength: 40 },
    xaxis: { ...AXIS, title: { text: xTitle, standoff: 8, font: { size: 12, color: muted } }, showgrid: false, showline: true, linecolor: colour("--strong-line"), ticks: "outside", ticklen: 4, tickcolor: colour("--strong-line"), nticks: Math.max(3, Math.round(width / 75)), unifiedhovertitle: { text: `${label(xTitle)} %{x}` } },
    yaxis: { ...AXIS, gridcolor: colour("--line"), nticks: 6, ticks: "" },
    annotations: [], shapes: [],
  };
}

function extent(lists, { zero = false, least = 0.02, pad = 0.07 } = {}) {
  const values = lists.flat().filter(known);
  if (!values.length) return [0, 1];
  let low = lowest(values), high = highest(values);
  if (zero) { low = Math.min(low, 0); high = Math.max(high, 0); }
  if (high - low < least) { const middle = (low + high) / 2; low = middle - least / 2; high = middle + least / 2; }
  const space = pad * (high - low);
  return [zero && low === 0 ? 0 : low - space, zero && high === 0 ? 0 : high + space];
}

// Lines with their names at their right ends, and bands behind them.
//   lines: [{name, x, y, colour, dash, weight, markers, labelled, raw}]   raw: thin and faint behind a smooth line
//   bands: [{x, low, high, colour, opacity}]   rules: [{y}]   ratios: on a logarithmic scale if far apart
function lineChart({ lines, bands = [], rules = [], xTitle, range, ratios = false, format = null, xFormat = ",", zero = false }) {
  return (width, height) => {
    const named = lines.filter((line) => line.labelled !== false && line.y.some(known));
    const limit = width < 480 ? 12 : 22;
    const longest = highest([0, ...named.map((line) => Math.min([...plain(line.name)].length, limit))]);
    const layout = baseLayout(width, { xTitle, right: named.length ? 18 + longest * 6.9 : 14 });
    const traces = [];
    for (const band of bands) {
      const side = { x: band.x, mode: "lines", type: "scatter", line: { width: 0, shape: "linear" }, hoverinfo: "skip", connectgaps: false };
      traces.push({ ...side, y: band.low }, { ...side, y: band.high, fill: "tonexty", fillcolor: fade(colour(band.colour), band.opacity) });
      if (band.names) { traces.at(-2).meta = band.names[0]; traces.at(-1).meta = band.names[1]; }
    }
    for (const line of lines) {
      const shade = colour(line.colour);
      const style = { x: line.x, type: "scatter", connectgaps: true, mode: line.markers || line.y.filter(known).length < 2 ? "lines+markers" : "lines" };
      if (line.raw) traces.push({ ...style, y: line.raw, mode: "lines", line: { color: fade(shade, 0.28), width: 1 }, hoverinfo: "skip" });
      traces.push({ ...style, y: line.y, name: label(line.name, 40), meta: line.name, line: { color: shade, width: line.weight || 2, dash: line.dash || "solid" }, marker: { size: 6, color: shade, line: { color: colour("--surface"), width: 1 } }, hovertemplate: `%{y:${format || ".3f"}}` });
    }
    const log = ratios && farApart(lines);
    const flat = log ? (y) => Math.log10(y) : (y) => y;
    const all = [...lines.flatMap((line) => [line.y, line.raw || []]), ...bands.flatMap((band) => [band.low, band.high])];
    const span = range || extent(log ? all.map((list) => list.filter((y) => known(y) && y > 0).map(Math.log10)) : all, { zero });
    const xs = lines.flatMap((line) => line.x).concat(bands.flatMap((band) => band.x)).filter(known);
    const ends = [lowest(xs), highest(xs)];
    layout.xaxis.range = ends[0] === ends[1] ? [ends[0] - 1, ends[1] + 1] : [ends[0] - 0.01 * (ends[1] - ends[0]), ends[1] + 0.005 * (ends[1] - ends[0])];
    layout.xaxis.tickformat = xFormat;
    layout.yaxis.range = span;
    layout.yaxis.tickformat = format || (span[1] - span[0] < 0.08 ? ".3f" : ".2f");
    if (log) Object.assign(layout.yaxis, { type: "log", tickvals: [0.1, 0.2, 0.5, 1, 2, 5, 10], tickformat: "~g" });
    for (const rule of rules) {
      layout.shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: rule.y, y1: rule.y, layer: "below", line: { color: colour("--muted"), width: 1, dash: "dot" } });
    }
    const plotHeight = height - layout.margin.t - layout.margin.b;
    const pixel = (y) => ((flat(y) - span[0]) / (span[1] - span[0])) * plotHeight;
    const tags = named.map((line) => ({ line, y: line.y.findLast(known) })).filter((tag) => !log || tag.y > 0);
    spreadOut(tags, pixel, 15, plotHeight);
    for (const tag of tags) {
      layout.annotations.push({ xref: "paper", x: 1, xanchor: "left", xshift: 7, yref: "y", y: flat(tag.y), yanchor: "middle", yshift: tag.shift, text: label(tag.line.name, limit), showarrow: false, font: { size: 12, color: colour(tag.line.colour) } });
    }
    return { traces, layout };
  };
}

// Ratios that differ by more than a factor of 2.5 are better seen on a logarithmic scale.
function farApart(lines) {
  const values = lines.flatMap((line) => line.y).filter((y) => known(y) && y > 0);
  return highest(values) / lowest(values) > 2.5;
}

// Labels that would overlap are pushed apart, in pixels.
function spreadOut(tags, pixel, gap, height) {
  tags.sort((a, b) => pixel(a.y) - pixel(b.y));
  const places = tags.map((tag) => pixel(tag.y));
  const room = Math.min(gap, height / Math.max(tags.length - 1, 1));
  for (let round = 0; round < 60; round++) {
    for (let i = 1; i < places.length; i++) {
      const lacking = room - (places[i] - places[i - 1]);
      if (lacking > 0.1) { places[i] += lacking / 2; places[i - 1] -= lacking / 2; }
    }
    places.forEach((place, i) => { places[i] = Math.min(Math.max(place, i * room), height - (places.length - 1 - i) * room); });
  }
  tags.forEach((tag, i) => { tag.shift = places[i] - pixel(tag.y); });
}

// Parts of a whole over time: [{name, x, y, colour}], as areas, or as bars where there are few.
function stackChart({ parts, xTitle, format = ".3~g", range }) {
  return (width) => {
    const layout = baseLayout(width, { xTitle });
    const bars = parts[0].x.length <= 60;
    layout.barmode = "stack";
    layout.bargap = 0.18;
    const traces = parts.map((part) => {
      const shade = colour(part.colour);
      const common = { x: part.x, y: part.y, name: label(part.name, 40), meta: part.name, hovertemplate: `%{y:${format}}` };
      if (bars) return { ...common, type: "bar", marker: { color: fade(shade, 0.78), line: { width: 0 } } };
      return { ...common, type: "scatter", mode: "lines", stackgroup: "all", line: { width: 0.5, color: shade }, fillcolor: fade(shade, 0.7) };
    });
    layout.yaxis.tickformat = format;
    layout.yaxis.rangemode = "tozero";
    if (range) layout.yaxis.range = range;
    return { traces, layout };
  };
}

function legend(items) {
  return el("ul", { class: "legend" }, items.map((item) => el("li", { class: item.kind, vars: { "--own": `var(${item.colour})` } }, item.name)));
}

// The mean of the neighbours, so that a noisy curve can be read; the width grows with the curve.
function smooth(values) {
  const reach = Math.floor(values.length / 24);
  if (!reach) return values;
  return values.map((value, i) => {
    const near = values.slice(Math.max(0, i - reach), i + reach + 1).filter(known);
    return known(value) && near.length ? near.reduce((a, b) => a + b) / near.length : null;
  });
}

// --- theme and paper -------------------------------------------------------------------------------

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
let chosenTheme = null;

function applyTheme(theme) {
  root.dataset.theme = theme;
  const button = document.getElementById("theme");
  button.textContent = theme === "dark" ? "Light" : "Dark";
  button.setAttribute("aria-pressed", String(theme === "dark"));
  button.setAttribute("aria-label", theme === "dark" ? "Switch to the light theme" : "Switch to the dark theme");
}

const currentTheme = () => chosenTheme || (prefersDark.matches ? "dark" : "light");

function setUpTheme() {
  applyTheme(currentTheme());
  document.getElementById("theme").addEventListener("click", () => {
    chosenTheme = root.dataset.theme === "dark" ? "light" : "dark";
    applyTheme(chosenTheme);
    redraw();
  });
  prefersDark.addEventListener("change", () => { applyTheme(currentTheme()); redraw(); });
  addEventListener("beforeprint", () => {
    root.classList.add("printing");
    applyTheme("light");
    for (const figure of figures) draw(figure, true);
  });
  addEventListener("afterprint", () => {
    root.classList.remove("printing");
    applyTheme(currentTheme());
    redraw();
  });
}
