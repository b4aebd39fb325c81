"use strict";
// Shared helpers: elements, colours, numbers as text, and the columns of runs. Text is inserted as text, never as HTML.
const byId = (id) => document.getElementById(id);

function make(name, attributes = {}, ...children) {
  const svg = ["svg", "rect", "line", "circle", "text", "title", "polyline", "path", "g"].includes(name);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "on") Object.entries(value).forEach(([event, f]) => node.addEventListener(event, f));
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

const isDark = () => document.documentElement.dataset.theme === "dark";
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// The i-th method's colour and dashes, as in the PNGs: seven colours, repeated with other dashes.
function look(data, i) {
  const { light, dark, dashes } = data.colours;
  const colours = isDark() ? dark : light;
  return { colour: colours[i % colours.length], dash: dashes[Math.floor(i / colours.length) % dashes.length] };
}

function figures(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-4)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

const signed = (value, digits) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(digits);

// A column of a run: one value per round, null where a round has none.
function column(data, run, name) {
  run.cache ??= {};
  if (!(name in run.cache)) {
    const place = run.columns[name];
    run.cache[name] = place === undefined ? null : spread(data.columns[place], run.rounds);
  }
  return run.cache[name];
}

const spread = (found, length) => (Array.isArray(found) ? found : new Array(length).fill(found));

const AXES = {
  round: { label: "rounds", title: "communication round", of: null },
  bytes: { label: "MB", title: "MB sent", of: ["bytes_down", "bytes_up"], scale: 1e-6 },
  grads: { label: "gradients", title: "gradient evaluations (minibatches)", of: ["grad_evals"], scale: 1 },
  seconds: { label: "seconds", title: "seconds, without evaluation", of: ["seconds"], scale: 1 },
  virtual: { label: "virtual seconds", title: "simulated seconds", of: ["virtual_seconds"], scale: 1, sums: true },
};

const runsOf = (data) => data.rows.flatMap((row) => row.runs);

// The axes for which every run has numbers.
function axesOf(data) {
  const runs = runsOf(data).filter((run) => run.rounds);
  return Object.keys(AXES).filter((name) => (AXES[name].of ?? []).every((key) => runs.every((run) => column(data, run, key))));
}

// The place of every round of a run on an axis: running totals, unless the column already has them (`sums`).
function along(data, run, axis) {
  const key = `x ${axis}`;
  run.cache ??= {};
  if (!run.cache[key]) {
    const { of, scale, sums } = AXES[axis];
    let sum = 0;
    run.cache[key] = Array.from({ length: run.rounds }, (_, i) => {
      if (!of) return i + 1;
      if (sums) return (sum = Math.max(sum, (column(data, run, of[0])[i] ?? sum) * scale));
      for (const name of of) sum += (column(data, run, name)[i] ?? 0) * scale;
      return sum;
    });
  }
  return run.cache[key];
}

function smoothed(values, window) {
  if (!window) return values;
  const kept = [];
  return values.map((value) => {
    if (value === null) return null;
    kept.push(value);
    if (kept.length > window + 1) kept.shift();
    return kept.reduce((a, b) => a + b, 0) / kept.length;
  });
}

// The measured points of a run.
function points(data, run, name, axis, window) {
  const values = column(data, run, name);
  if (!values) return { x: [], y: [] };
  const x = along(data, run, axis), y = smoothed(values, window), keep = [];
  y.forEach((value, i) => value !== null && keep.push(i));
  return { x: keep.map((i) => x[i]), y: keep.map((i) => y[i]) };
}

// Linear interpolation at other places; null outside the points. Both x are increasing.
function placed(curve, xs) {
  let j = 0;
  const { x, y } = curve, end = x.length - 1;
  return xs.map((at) => {
    if (end < 0 || at < x[0] || at > x[end]) return null;
    while (j < end && x[j + 1] < at) j++;
    if (j === end || x[j] >= at) return y[j];
    if (x[j + 1] === at) return y[j + 1];
    return y[j] + ((y[j + 1] - y[j]) * (at - x[j])) / (x[j + 1] - x[j]);
  });
}

// The mean of the curves, where every one has a value.
function mean(curves) {
  if (!curves.length) return [];
  return curves[0].map((_, i) => {
    let sum = 0;
    for (const curve of curves) {
      if (curve[i] === null) return null;
      sum += curve[i];
    }
    return sum / curves.length;
  });
}

function tableOf(header, lines) {
  const head = make("tr", {}, ...header.map((title) => make("th", { scope: "col" }, title)));
  const body = lines.map(([name, ...cells]) =>
    make("tr", {}, make("th", { scope: "row" }, name), ...cells.map((cell) => make("td", {}, cell))));
  const table = make("table", { class: "numbers" }, make("thead", {}, head), make("tbody", {}, ...body));
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table" }, table);
}
