// Elements, numbers and text. Whatever comes from a run is set as text, never as HTML.

// What would act instead of being read: control codes, marks that turn the direction of text, halves of characters.
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

function codeOf(character) {
  const code = character.charCodeAt(0);
  return code < 256 ? "\\x" + code.toString(16).padStart(2, "0") : "\\u" + code.toString(16).padStart(4, "0");
}

function plain(text) {
  return String(text).replace(CONTROL, codeOf);
}

// An element: attributes as given, `on...` functions as listeners, `vars` as CSS variables, strings as text.
function el(tag, attributes = {}, ...children) {
  const node = tag.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "vars") for (const [variable, setting] of Object.entries(value)) node.style.setProperty(variable, setting);
    else if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : plain(value));
  }
  for (const child of children.flat(2)) {
    if (child === null || child === undefined) continue;
    node.append(child instanceof Node ? child : plain(child));
  }
  return node;
}

// Text of a model: codes are shown, and what was searched for is marked.
function modelText(text, search = "") {
  const node = el("pre", { class: "said", tabindex: text.length > 900 ? "0" : null });
  const lower = text.toLowerCase();
  const wanted = lower.length === text.length ? search.toLowerCase() : "";
  let from = 0;
  while (wanted) {
    const at = lower.indexOf(wanted, from);
    if (at < 0) break;
    appendVisible(node, text.slice(from, at));
    appendVisible(node.appendChild(document.createElement("mark")), text.slice(at, at + wanted.length));
    from = at + wanted.length;
  }
  appendVisible(node, text.slice(from));
  return node;
}

function appendVisible(node, text) {
  let from = 0;
  for (const found of text.matchAll(CONTROL)) {
    node.append(text.slice(from, found.index), el("span", { class: "control", title: "a control character" }, codeOf(found[0])));
    from = found.index + found[0].length;
  }
  node.append(text.slice(from));
}

const NONE = "–";
const known = (value) => typeof value === "number" && Number.isFinite(value);
const lowest = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const highest = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
const minus = (text) => text.replace(/^-/, "−");
const fixed = (value, digits = 3) => (known(value) ? minus(value.toFixed(digits)) : NONE);
const count = (value) => (known(value) ? minus(Math.round(value).toLocaleString("en-US")) : NONE);
const percent = (value) => (known(value) ? `${Math.round(100 * value)}%` : NONE);
const points = (value) => (known(value) ? (value > 0 ? "+" : "") + minus((100 * value).toFixed(1)) : NONE);
const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

function duration(seconds) {
  if (!known(seconds)) return NONE;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 100 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function list(words) {
  return words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
}

// A table inside something that scrolls, so that the page does not. Cells are strings, elements or {text, class}.
function table(head, rows, { caption, className, textColumns = 1 } = {}) {
  const cell = (tag, value, i, scope) => {
    const rich = value !== null && typeof value === "object" && !(value instanceof Node) && !Array.isArray(value);
    const classes = [i < textColumns ? "text" : "", rich ? value.class || "" : ""].join(" ").trim();
    return el(tag, { class: classes || null, scope }, rich ? value.text : value);
  };
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption || "table" },
    el("table", { class: className },
      caption ? el("caption", {}, caption) : null,
      el("thead", {}, el("tr", {}, head.map((value, i) => cell("th", value, i, "col")))),
      el("tbody", {}, rows.map((row) => {
        const cells = row.cells || row;
        return el("tr", { class: row.class }, cells.map((value, i) => (i ? cell("td", value, i) : cell("th", value, i, "row"))));
      }))));
}

// A choice among a few, as radio buttons that look like one switch.
let switches = 0;
function choice(title, options, onChange) {
  const name = `switch-${switches++}`;
  return el("fieldset", { class: "switch" }, el("legend", {}, title), options.map(([value, label], i) =>
    el("label", {}, el("input", { type: "radio", name, value, checked: i === 0, onchange: () => onChange(value) }), label)));
}

function section(parent, id, title, lead) {
  const node = el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), lead ? el("p", { class: "lead" }, lead) : null);
  parent.append(node);
  return node;
}

const empty = (text) => el("p", { class: "empty" }, text);
const agentColour = (index) => `--agent-${(index + 8) % 8}`;
const agentName = (name, index, className = "") => el("span", { class: `agent ${className}`, vars: { "--own": `var(${agentColour(index)})` } }, name);
