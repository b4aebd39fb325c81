"use strict";
/* Drawings: the plane of models and the curve of distances. State in, SVG out; nothing is remembered here. */

const SVG = "http://www.w3.org/2000/svg";

function shape(name, attributes, parent, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

const points = path => path.map(([u, v]) => `${u.toFixed(4)},${(-v).toFixed(4)}`).join(" ");
const colour = i => `var(--c${i % 6})`;

/* The level line F = 1/2 size^2 of a quadratic (a, b; b, c): half axes size / sqrt(eigenvalue). */
function level(at, { a, b, c }, size, attributes, parent) {
  const middle = (a + c) / 2, half = Math.hypot((a - c) / 2, b);
  const angle = Math.atan2(2 * b, a - c) / 2;  // of the eigenvector of the larger eigenvalue
  const place = `translate(${at[0]} ${-at[1]}) rotate(${-angle * 180 / Math.PI})`;
  shape("ellipse", { rx: size / Math.sqrt(middle + half), ry: size / Math.sqrt(middle - half), transform: place, ...attributes },
    parent);
}

function arrow(from, by, stroke, parent) {
  const length = Math.hypot(...by);
  if (length < 0.02) return;
  const [u, v] = [by[0] / length, by[1] / length], head = Math.min(0.22, length / 2);
  const end = [from[0] + by[0], from[1] + by[1]], neck = [end[0] - head * u, end[1] - head * v];
  const wing = side => [neck[0] - side * 0.45 * head * v, neck[1] + side * 0.45 * head * u];
  shape("polyline", { points: points([from, neck]), class: "dual", stroke }, parent);
  shape("polygon", { points: points([end, wing(1), wing(-1)]), fill: stroke }, parent);
}

function star(at, size, attributes, parent) {
  const corners = Array.from({ length: 10 }, (_, k) => {
    const angle = Math.PI / 2 + k * Math.PI / 5, reach = k % 2 ? size * 0.42 : size;
    return [at[0] + reach * Math.cos(angle), at[1] + reach * Math.sin(angle)];
  });
  shape("polygon", { points: points(corners), ...attributes }, parent);
}

/* Everything below the handles. */
function drawPlane(layer, state) {
  layer.replaceChildren();
  const { clients, best, pulls, trace, last, showDuals } = state;
  const mean = { a: 0, b: 0, c: 0 };
  for (const client of clients) for (const key of "abc") mean[key] += client[key] / clients.length;
  for (let k = 1; k <= 10; k++) level(best, mean, 0.42 * k, { class: "level" }, layer);
  clients.forEach((client, i) =>
    level(client.optimum, client, 0.36, { class: "bowl", fill: colour(i), stroke: colour(i) }, layer));
  star(best, 0.27, { class: "best" }, layer);
  if (last) for (const [i, path] of Object.entries(last.paths)) {
    shape("polyline", { points: points(path), class: "path", stroke: colour(i) }, layer);
    const [u, v] = path.at(-1);
    shape("circle", { cx: u, cy: -v, r: 0.07, fill: colour(i) }, layer);
  }
  if (trace.length > 1) shape("polyline", { points: points(trace), class: "trace" }, layer);
  for (const [u, v] of trace.slice(1, -1)) shape("circle", { cx: u, cy: -v, r: 0.04, class: "past" }, layer);
  if (showDuals && last && Object.keys(last.duals).length) {
    pulls.forEach(([u, v], i) =>
      shape("circle", { cx: best[0] + u, cy: -best[1] - v, r: 0.11, class: "ring", stroke: colour(i) }, layer));
    for (const [i, dual] of Object.entries(last.duals)) arrow(best, dual, colour(i), layer);
  }
  if (trace.length > 1) {
    const [u, v] = trace.at(-1);
    shape("circle", { cx: u, cy: -v, r: 0.1, class: "now" }, layer);
  }
}

/* Distances over rounds, on a logarithmic axis; `before` is the run before this one. */
function drawCurve(box, now, before) {
  box.replaceChildren();
  const [left, right, top, bottom] = [44, 352, 12, 158];
  const values = [...now.far, ...(before ? before.far : [])].filter(value => value > 0);
  const low = Math.max(-15, Math.floor(Math.log10(Math.min(0.1, ...values)))), high = Math.ceil(Math.log10(Math.max(1, ...values)));
  const rounds = Math.max(20, now.far.length - 1, before ? before.far.length - 1 : 0);
  const x = t => left + (right - left) * t / rounds;
  const y = value => bottom - (bottom - top) * (Math.max(Math.log10(value || 1e-300), low) - low) / (high - low);
  const every = Math.ceil((high - low) / 5);
  for (let power = high; power >= low; power -= every) {
    shape("line", { x1: left, x2: right, y1: y(10 ** power), y2: y(10 ** power), class: "axis" }, box);
    const tick = shape("text", { x: left - 6, y: y(10 ** power) + 3, class: "tickmark", "text-anchor": "end" }, box, "10");
    shape("tspan", { dy: -4, "font-size": 8 }, tick, String(power).replace("-", "−"));
  }
  for (const t of [0, Math.round(rounds / 2), rounds])
    shape("text", { x: x(t), y: bottom + 14, class: "tickmark", "text-anchor": t === rounds ? "end" : "middle" }, box, t);
  shape("text", { x: left, y: 186, class: "tickmark" }, box, "distance to the optimum over rounds" +
    (before ? `; dashed: ${before.name}` : ""));
  const line = (far, name) => shape("polyline",
    { points: far.map((value, t) => `${x(t).toFixed(1)},${y(value).toFixed(1)}`).join(" "), class: name }, box);
  if (before) line(before.far, "before");
  line(now.far, "curve");
}

/* What the signs on the plane mean. */
function drawKey(list) {
  const entries = [
    ["optimum of the mean loss", icon => star([0, 0], 0.42, { class: "best" }, icon)],
    ["server, round by round", icon => {
      shape("polyline", { points: "-.6,0 .2,0", class: "trace", style: "stroke-width: .12" }, icon);
      shape("circle", { cx: 0.3, cy: 0, r: 0.22, class: "now" }, icon);
    }],
    ["a client's steps in the last round", icon => {
      shape("polyline", { points: "-.6,.2 0,-.2 .3,-.1", class: "path", stroke: colour(0), style: "stroke-width: .1" }, icon);
      shape("circle", { cx: 0.4, cy: -0.1, r: 0.16, fill: colour(0) }, icon);
    }],
    ["what a client knows: h/λ or −c", icon => {
      shape("polyline", { points: "-.6,0 .2,0", stroke: colour(1), style: "stroke-width: .14" }, icon);
      shape("polygon", { points: ".65,0 .15,.25 .15,-.25", fill: colour(1) }, icon);
    }],
    ["where that ends: minus its gradient at the optimum", icon =>
      shape("circle", { cx: 0, cy: 0, r: 0.3, class: "ring", stroke: colour(1), style: "stroke-width: .12" }, icon)],
  ];
  for (const [text, draw] of entries) {
    const entry = document.createElement("li");
    draw(shape("svg", { viewBox: "-.7 -.5 1.4 1", "aria-hidden": "true" }, entry));
    entry.append(text);
    list.append(entry);
  }
}
