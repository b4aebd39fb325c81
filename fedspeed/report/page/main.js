// Reads the data, draws the page, and handles the controls.
async function readData() {
  const element = byId("data");
  if (!element.dataset.packed) return JSON.parse(element.textContent);
  if (!("DecompressionStream" in globalThis)) throw new Error("this browser is too old to unpack the data (DecompressionStream)");
  const bytes = Uint8Array.from(atob(element.textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

function legend(data) {
  byId("legend").replaceChildren(...data.rows.map((row, i) => {
    const { colour, dash } = look(data, i);
    const line = make("svg", { width: 26, height: 10, "aria-hidden": "true" }, make("line", { x1: 0, x2: 26, y1: 5, y2: 5, stroke: colour, "stroke-width": 3, "stroke-dasharray": dash.join(" ") }));
    const button = make("button", { type: "button", "aria-pressed": String(!view.hidden.has(i)), title: "press to hide or show; with Shift: this one alone", "data-row": i }, line, row.label);
    button.onclick = (event) => {
      if (event.shiftKey) {
        const alone = view.hidden.size === data.rows.length - 1 && !view.hidden.has(i);
        view.hidden = alone ? new Set() : new Set(data.rows.map((_, j) => j).filter((j) => j !== i));
      } else if (!view.hidden.delete(i)) view.hidden.add(i);
      [...byId("legend").children].forEach((one, j) => one.setAttribute("aria-pressed", String(!view.hidden.has(j))));
      showMethods();
      drawFairness(data);
    };
    return button;
  }));
  for (const swatch of document.querySelectorAll(".swatch")) {
    const { colour, dash } = look(data, Number(swatch.dataset.row));
    swatch.style.borderTopColor = colour;
    swatch.style.borderTopStyle = dash.length ? "dashed" : "solid";
  }
}

function controls(data) {
  const names = axesOf(data);
  if (!names.includes(view.axis)) view.axis = "round";
  const choices = names.map((name) => {
    const input = make("input", { type: "radio", name: "axis", value: name });
    input.checked = name === view.axis;
    input.onchange = () => ((view.axis = name), drawCurves(data));
    return make("label", {}, input, make("span", {}, AXES[name].label));
  });
  byId("axis").replaceChildren(make("legend", {}, "Against"), ...choices);
  byId("smooth").oninput = (event) => {
    view.window = Number(event.target.value);
    byId("smooth-value").textContent = view.window ? `over ${view.window + 1}` : "off";
    drawCurves(data);
  };
  for (const name of ["seeds", "settled", "log"]) byId(name).onchange = (event) => ((view[name] = event.target.checked), drawCurves(data));
  byId("reset").onclick = resetZoom;
  byId("csv").onclick = () => save("rounds.csv", toCsv(data));
}

// Every number of every round as CSV, as in the run directories (times to the microsecond).
function toCsv(data) {
  const names = [...new Set(runsOf(data).flatMap((run) => Object.keys(run.columns)))];
  const quoted = (value) => (value === null || value === undefined ? "" : /[",\n\r]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
  const lines = [["method", "seed", "folder", "status", "round", ...names].map(quoted).join(",")];
  for (const row of data.rows)
    for (const run of row.runs) {
      const columns = names.map((name) => column(data, run, name)), start = [row.label, run.seed, run.folder, run.status].map(quoted).join(",");
      for (let i = 0; i < run.rounds; i++) lines.push(`${start},${i + 1},${columns.map((values) => quoted(values && values[i])).join(",")}`);
    }
  return lines.join("\n") + "\n";
}

function save(name, text) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function navigation() {
  const shown = [...document.querySelectorAll("section[data-nav]")].filter((section) => !section.hidden);
  document.querySelector("nav").replaceChildren(...shown.map((section) => make("a", { href: `#${section.id}` }, section.dataset.nav)));
}

// Draws the page from data: at the start, and again for every update.
function render(data, more = false) {
  legend(data);
  controls(data);
  drawForest(data);
  if (!more || !refreshCurves(data)) drawCurves(data);
  drawSplits(data);
  drawFairness(data);
  for (const id of ["verdict", "config", "methods", "provenance"]) byId(id).hidden = !data.rows.length;
  navigation();
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  byId("theme").textContent = name === "dark" ? "Light" : "Dark";
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
theme(prefersDark.matches ? "dark" : "light");
navigation();

const report = {
  data: null,
  // An update, for example the same runs a round later: hidden methods, zoom, choices and focus are kept.
  update(data) {
    const before = report.data, zoom = before && zoomed(), axis = view.axis, focus = before && focused();
    const hidden = new Set([...view.hidden].map((i) => before.rows[i].label));
    view.hidden = new Set(data.rows.flatMap((row, i) => (hidden.has(row.label) ? [i] : [])));
    const alike = before && before.rows.length === data.rows.length && before.rows.every((row, i) => row.label === data.rows[i].label);
    document.body.style.minHeight = `${document.body.offsetHeight}px`; // else a page that is shorter for a moment scrolls
    report.data = data;
    render(data, alike);
    if (zoom && axis === view.axis) for (const { chart } of view.panels) chart.setScale("x", zoom);
    document.body.style.minHeight = "";
    if (focus && document.activeElement === document.body) document.querySelector(focus)?.focus({ preventScroll: true });
  },
};

// The selector of the focused element, if it will be created again.
function focused() {
  const { dataset, name, value } = document.activeElement;
  if (dataset.row) return `#legend [data-row="${dataset.row}"]`;
  return name === "axis" ? `input[value="${value}"]` : null;
}

readData().then((data) => {
  report.update(data);
  const change = (name) => (theme(name), render(report.data));
  byId("theme").onclick = () => change(isDark() ? "light" : "dark");
  prefersDark.addEventListener("change", (event) => change(event.matches ? "dark" : "light"));
  let chosen;
  addEventListener("beforeprint", () => ((chosen = document.documentElement.dataset.theme), change("light")));
  addEventListener("afterprint", () => change(chosen));
  document.documentElement.dataset.ready = "true";
}).catch((error) => {
  byId("trouble").textContent = `The curves cannot be drawn: ${error.message}`;
  byId("trouble").hidden = false;
});
