"use strict";
/* The page: what is chosen, who is dragged, when a round is run. Python is asked through window.python. */

const byId = id => document.getElementById(id);
const EDGE = 4.3;
const SHAPES = [[0.2, 1, 0.15], [1.5, 1, 0.2], [2.4, 0.8, 0.12], [0.9, 0.6, 0.3], [2.9, 0.9, 0.25], [0.5, 0.7, 0.1]];
const HOMES = [[-3, 1.6], [2.2, 2.7], [3, -1.2], [-1.4, -2.4], [-0.4, 3.3], [0.9, -3.2]];
const START = [-3.4, -3.2];
const COMMON = {
  N: ["clients", 2, 6, 4, false], active: ["clients active in a round", 1, 6, 4, false],
  K: ["local steps K", 1, 50, 10, false], lr: ["local rate", 0.01, 1, 0.2, true],
};
const RANGES = {
  lam: [0.1, 100, true], rho: [0, 1, false], mu: [0, 5, false], eta_g: [0.01, 2, true], alpha: [0, 1, false],
  beta1: [0, 0.99, false], beta2: [0, 1, false], gamma: [0, 0.99, false],
};  // of methods' numbers; the others, and what lies outside, keep their default
const FIRST = { lam: 2, "feddyn.alpha": 0.5, "fedspeed.rho": 0 };  // on bowls of curvature 1 the paper's lam = 10 is slow

const state = { homes: HOMES.map(home => [...home]), x0: [...START], values: {}, fields: {}, timer: 0, before: null };
const chosen = () => window.METHODS.find(method => method.name === byId("method").value);

function clients() {
  const own = byId("own").checked;
  return state.homes.slice(0, state.values.N).map((optimum, i) => {
    const [angle, big, small] = own ? SHAPES[i] : [0.6, 0.8, 0.4], [u, v] = [Math.cos(angle), Math.sin(angle)];
    return { optimum, a: big * u * u + small * v * v, b: (big - small) * u * v, c: big * v * v + small * u * u };
  });
}

/* A run from its beginning; `keep`: what was seen of the last one stays as a dashed curve. */
function restart(keep = true) {
  if (!window.python) return;
  if (keep && state.far && state.far.length > 2) state.before = { name: state.label, far: state.far };
  const method = chosen(), { K, lr, active } = state.values;
  state.clients = clients();
  const said = JSON.parse(window.python.start(JSON.stringify({
    module: method.module, cls: method.cls, fields: state.fields, clients: state.clients, x0: state.x0, K, lr, active,
  })));
  const far = Math.hypot(state.x0[0] - said.optimum[0], state.x0[1] - said.optimum[1]);
  Object.assign(state, { best: said.optimum, pulls: said.pulls, trace: [state.x0], last: null, far: [far], label: method.cls });
  tell(said.error, Boolean(said.error));
  show();
}

function advance() {
  const last = JSON.parse(window.python.step());
  if (!last) {
    pause();
    tell(byId("message").textContent || `${state.label}: the model ran away; take a smaller rate, or reset.`, true);
    return;
  }
  state.last = last;
  state.trace.push(last.x);
  state.far.push(last.distance);
  show();
}

function tell(text, wrong) {
  byId("message").textContent = text;
  byId("message").classList.toggle("wrong", wrong);
}

const short = value => value === 0 ? "0" : Math.abs(value) < 1e-3 ? value.toExponential(2) : value.toFixed(4);

function show() {
  const x = state.trace.at(-1), far = state.far.at(-1);
  byId("round").textContent = state.far.length - 1;
  byId("server").textContent = `${x[0].toFixed(4)}, ${x[1].toFixed(4)}`;
  byId("server").dataset.x = JSON.stringify(x);
  byId("distance").textContent = short(far);
  drawPlane(below, { ...state, showDuals: byId("duals").checked });
  drawCurve(byId("curve"), { far: state.far }, state.before);
}

function play() {
  if (state.timer) return pause();
  byId("play").textContent = "Pause";
  state.timer = setInterval(() => state.far.length > 300 ? pause() : advance(), 160);
}

function pause() {
  clearInterval(state.timer);
  state.timer = 0;
  byId("play").textContent = "Play";
}

/* A slider; logarithmic ones hold the exponent. */
function slider(parent, name, label, [low, high, log], value, whole, changed) {
  const box = document.createElement("div"), input = document.createElement("input"), shown = document.createElement("output");
  const title = document.createElement("label");
  box.className = "slider";
  Object.assign(input, { type: "range", id: `set-${name}` });
  title.htmlFor = input.id;
  title.textContent = label;
  Object.assign(input, log ? { min: Math.log10(low), max: Math.log10(high), step: 0.01, value: Math.log10(value) } :
    { min: low, max: high, step: whole ? 1 : 0.01, value });
  const read = () => log ? Number((10 ** input.valueAsNumber).toPrecision(3)) : input.valueAsNumber;
  shown.textContent = value;
  input.addEventListener("input", () => {
    shown.textContent = read();
    input.setAttribute("aria-valuetext", read());
    changed(read());
  });
  box.append(title, shown, input);
  parent.append(box);
  return { set(next) { input.value = next; shown.textContent = next; }, input };
}

function choice(parent, field, value, changed) {
  const box = document.createElement("label"), list = document.createElement("select");
  box.className = "choice";
  const names = typeof value === "boolean" ? ["true", "false"] : field.allowed;
  for (const name of names) list.add(new Option(name, name, name === String(value), name === String(value)));
  list.id = `set-${field.name}`;
  list.addEventListener("change", () => changed(typeof value === "boolean" ? list.value === "true" : list.value));
  box.append(field.name, list);
  box.title = field.about;
  parent.append(box);
}

/* What a field is, in a few words: "the paper's rho_0, length of the ascent step" is the length of the ascent step. */
function brief(field) {
  const [first, second] = field.about.split(", ");
  const said = first === field.name || (first.startsWith("the paper's") && !second?.startsWith("1/"));
  return said && second ? second : first;
}

/* The chosen method's own fields. */
function offer() {
  const method = chosen(), box = byId("fields"), more = document.createElement("details");
  box.replaceChildren();
  more.append(Object.assign(document.createElement("summary"), { textContent: `switches of ${method.cls}` }));
  byId("about").textContent = method.about;
  state.fields = {};
  for (const field of method.fields) {
    const value = FIRST[`${method.name}.${field.name}`] ?? FIRST[field.name] ?? field.default;
    const changed = next => { state.fields[field.name] = next; restart(); };
    if (value !== field.default) state.fields[field.name] = value;
    if (typeof value === "boolean" || Array.isArray(field.allowed)) choice(more, field, value, changed);
    else if (RANGES[field.name]) {
      let [low, high, log] = RANGES[field.name];
      if (!log && field.allowed.startsWith("(")) low = 0.01;
      if (value < low || value > high) [low, high] = [Math.min(low, value), Math.max(high, value)];
      slider(box, field.name, `${field.name}: ${brief(field)}`, [low, high, log], value, false, changed);
    }
  }
  if (more.children.length > 1) box.append(more);
}

/* Discs and the start: dragged by mouse, pen or finger, moved by arrow keys. */
function handles() {
  above.replaceChildren();
  const spots = state.homes.slice(0, state.values.N).map((spot, i) => [spot, `optimum of client ${i + 1}`, String(i + 1), colour(i)]);
  for (const [spot, name, text, fill] of [[state.x0, "start of the server", "", ""], ...spots]) {
    const group = shape("g", { class: "handle", tabindex: 0, role: "button" }, above);
    shape("circle", { r: 0.42, class: "halo" }, group);
    if (text) {
      shape("circle", { r: 0.24, fill }, group);
      shape("text", {}, group, text);
    } else shape("rect", { x: -0.13, y: -0.13, width: 0.26, height: 0.26, transform: "rotate(45)", class: "start" }, group);
    const place = () => {
      group.setAttribute("transform", `translate(${spot[0]} ${-spot[1]})`);
      group.setAttribute("aria-label", `${name} at ${spot[0].toFixed(1)}, ${spot[1].toFixed(1)}; arrow keys move it`);
    };
    const move = to => {
      to.forEach((value, k) => { spot[k] = Math.max(-EDGE, Math.min(EDGE, Math.round(value * 100) / 100)); });
      place();
      restart(false);
    };
    group.addEventListener("pointerdown", event => {
      group.setPointerCapture(event.pointerId);
      event.preventDefault();
      group.focus({ focusVisible: false });
    });
    group.addEventListener("touchstart", event => event.preventDefault(), { passive: false });  // else the page scrolls
    group.addEventListener("pointermove", event => {
      if (!group.hasPointerCapture(event.pointerId)) return;
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(byId("plane").getScreenCTM().inverse());
      move([at.x, -at.y]);
    });
    group.addEventListener("keydown", event => {
      const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
      if (!by) return;
      event.preventDefault();
      const size = event.shiftKey ? 0.5 : 0.1;
      move([spot[0] + size * by[0], spot[1] + size * by[1]]);
    });
    place();
  }
}

const below = shape("g", {}, byId("plane")), above = shape("g", {}, byId("plane"));

for (const [name, [label, low, high, value, log]] of Object.entries(COMMON)) {
  state.values[name] = value;
  const made = slider(byId("sliders"), name, label, [low, high, log], value, !log, next => {
    state.values[name] = next;
    const { N, active } = state.values;
    if (name === "N") {
      sliders.active.input.max = N;
      if (active > N || active === Number(sliders.active.input.dataset.all)) sliders.active.set(state.values.active = N);
      handles();
    }
    sliders.active.input.dataset.all = state.values.active === N ? N : "";
    restart();
  });
  (window.sliders ??= {})[name] = made;
}
sliders.active.input.max = sliders.active.input.dataset.all = state.values.N;
for (const family of new Set(window.METHODS.map(method => method.family))) {
  const group = document.createElement("optgroup");
  group.label = family;
  for (const method of window.METHODS) if (method.family === family) group.append(new Option(method.cls, method.name));
  byId("method").append(group);
}
byId("method").value = "fedspeed";
offer();
handles();
drawKey(byId("key"));
byId("method").addEventListener("change", () => { offer(); restart(); });
byId("own").addEventListener("change", () => restart(false));
byId("duals").addEventListener("change", show);
byId("play").addEventListener("click", play);
byId("step").addEventListener("click", () => { pause(); advance(); });
byId("reset").addEventListener("click", () => {
  pause();
  Object.assign(state, { homes: HOMES.map(home => [...home]), x0: [...START], far: null, before: null });
  handles();
  restart(false);
});
document.addEventListener("python", () => {
  for (const id of ["play", "step", "reset"]) byId(id).disabled = false;
  restart(false);
  document.documentElement.dataset.ready = "";
});
window.addEventListener("load", () => setTimeout(() => window.__BRYTHON__.runPythonSource("import bridge")));  // seconds
