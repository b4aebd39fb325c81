// Panels of curves that share hover, zoom and hidden methods.
const WHOLE = Array.from({ length: 9 }, (_, k) => [1, 2, 5].map((n) => n * 10 ** k)).flat(); // steps between rounds
const GRID = 800; // places on an axis that is not rounds, where runs differ

const view = { axis: "round", window: 0, seeds: true, settled: true, log: false, hidden: new Set(), panels: [] };

const PANELS = [
  { key: "test_accuracy", title: "Test accuracy (%)", scale: 100, into: "panels" },
  { key: "test_loss", title: "Test loss", scale: 1, into: "panels", log: true },
  { key: "train_loss", title: "Training loss", scale: 1, into: "panels", log: true },
  { key: "validation_accuracy", title: "Validation accuracy (%)", scale: 100, into: "panels" },
  { key: "validation_loss", title: "Validation loss", scale: 1, into: "panels", log: true },
  { key: "drift", title: "Drift, mean ‖x_iK − x‖²", scale: 1, into: "motion-panels", log: true },
  { key: "update_norm", title: "Update norm ‖x⁺ − x‖", scale: 1, into: "motion-panels", log: true },
];

// The title of a metric of a method, for example h_norm; x_norm and H_norm are those of a running mean.
const titleOf = (name) => name.replace(/^(\w+)_norm$/, "Norm of $1, ‖$1‖");

// The panels to draw: the known ones, and one per metric of a method.
function panelsOf(data) {
  const names = new Set(runsOf(data).flatMap((run) => Object.keys(run.columns)));
  const own = [...names].filter((name) => name.startsWith("metrics.")).sort();
  const more = own.map((key) => ({ key, title: titleOf(key.slice(8)), scale: 1, into: "motion-panels", log: true }));
  return [...PANELS, ...more].filter((panel) => names.has(panel.key));
}

// The series of a panel: per method its seeds (thin) and their mean (bold), all at the same x.
function series(data, panel) {
  const rows = data.rows.map((row) => {
    const runs = row.runs.filter((run) => run.rounds);
    return { runs, curves: runs.map((run) => points(data, run, panel.key, view.axis, view.window)) };
  });
  const all = rows.flatMap((row) => row.curves).filter((curve) => curve.x.length);
  if (!all.length) return null;
  let xs;
  if (view.axis === "round") xs = [...new Set(all.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  else {
    const low = Math.min(...all.map((curve) => curve.x[0])), high = Math.max(...all.map((curve) => curve.x.at(-1)));
    xs = Array.from({ length: GRID }, (_, i) => low + ((high - low) * i) / (GRID - 1));
    xs[GRID - 1] = high;
  }
  const lines = [], ends = [];
  rows.forEach(({ runs, curves }, i) => {
    const at = curves.map((curve) => placed(curve, xs).map((y) => (y === null || (view.log && panel.log && y <= 0) ? null : y * panel.scale)));
    const counted = runs.map((run, j) => j).filter((j) => runs[j].done);
    const group = counted.length ? counted : runs.map((_, j) => j);
    if (view.seeds && runs.length > 1) at.forEach((values) => lines.push({ row: i, bold: false, values }));
    if (group.length) lines.push({ row: i, bold: true, values: mean(group.map((j) => at[j])) });
    runs.forEach((run, j) => {
      if (run.status.startsWith("diverged") && curves[j].x.length)
        ends.push({ row: i, x: curves[j].x.at(-1), y: curves[j].y.at(-1) * panel.scale });
    });
  });
  lines.sort((a, b) => a.bold - b.bold); // means on top
  return { xs, lines, ends };
}

// The range of the values after the first quarter, as in the PNGs.
function settledRange(found) {
  const from = found.xs[0] + (found.xs.at(-1) - found.xs[0]) / 4;
  let low = Infinity, high = -Infinity;
  for (const line of found.lines) {
    if (view.hidden.has(line.row)) continue;
    line.values.forEach((y, i) => {
      if (y !== null && found.xs[i] >= from) [low, high] = [Math.min(low, y), Math.max(high, y)];
    });
  }
  return low <= high ? [low, high] : null;
}

function rangeOf(found, log) {
  return (u, low, high) => {
    if (low === null || high === null) return [log ? 0.1 : 0, 1];
    const whole = u.scales.x.min <= found.xs[0] && u.scales.x.max >= found.xs.at(-1);
    const settled = whole && view.settled ? settledRange(found) : null;
    if (settled) [low, high] = settled;
    if (log) return [low / 1.15, high * 1.15];
    const room = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
    return [low - room, high + room];
  };
}

function draw(data, panel) {
  const found = series(data, panel);
  if (!found) return;
  const box = make("div", { class: "plot", tabindex: "0", role: "img", "aria-label": `${panel.title} against ${AXES[view.axis].title}` });
  const readout = make("div", { class: "readout", "aria-live": "polite" });
  byId(panel.into).append(make("figure", { "data-panel": panel.key }, make("figcaption", {}, panel.title), box, readout));
  const log = view.log && panel.log, ink = css("--soft"), line = css("--line");
  const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1, size: 5 }, font: "12px system-ui, sans-serif" };
  const lines = found.lines.map(({ row, bold }) => {
    const { colour, dash } = look(data, row);
    return {
      label: data.rows[row].label, stroke: bold ? colour : `${colour}66`, width: bold ? 2.4 : 1, dash: bold && dash.length ? dash : undefined,
      spanGaps: true, show: !view.hidden.has(row), points: { show: found.xs.length < 3, size: 5 },
    };
  });
  const options = {
    width: box.clientWidth || 500, height: 260, legend: { show: false }, series: [{}, ...lines],
    scales: { x: { time: false }, y: { range: rangeOf(found, log), distr: log ? 3 : 1 } },
    axes: [
      { ...axis, label: AXES[view.axis].title, labelSize: 20, labelFont: "12px system-ui, sans-serif", size: 34, space: 60, incrs: view.axis === "round" ? WHOLE : undefined },
      { ...axis, size: 58, values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : figures(tick))) },
    ],
    cursor: { sync: { key: "fedspeed", scales: ["x", null] }, drag: { x: true, y: false, setScale: true }, points: { show: false }, y: false },
    hooks: {
      setCursor: [(u) => tell(data, found, u, readout)],
      setScale: [(u, key) => key === "x" && follow(u)],
      draw: [(u) => crosses(data, found, u)],
    },
  };
  const chart = new uPlot(options, [found.xs, ...found.lines.map((l) => l.values)], box);
  box.addEventListener("keydown", (event) => keys(event, chart, found));
  view.panels.push({ chart, found, box, panel });
}

// The means at the cursor.
function tell(data, found, u, readout) {
  const at = u.cursor.idx;
  if (at === null || at === undefined) return readout.replaceChildren();
  const shown = found.lines.filter((l) => l.bold && !view.hidden.has(l.row) && l.values[at] !== null);
  shown.sort((a, b) => b.values[at] - a.values[at]);
  const parts = shown.slice(0, 12).map((l) => {
    const dot = make("span", { class: "dot" });
    dot.style.background = look(data, l.row).colour;
    return make("span", {}, dot, `${data.rows[l.row].label} `, make("b", {}, figures(l.values[at])));
  });
  const more = shown.length > 12 ? [make("span", {}, `and ${shown.length - 12} more`)] : [];
  readout.replaceChildren(make("span", {}, `${AXES[view.axis].title} ${figures(found.xs[at], 5)}:`), ...parts, ...more);
}

let following = false;
function follow(u) {
  if (following) return;
  following = true;
  for (const { chart } of view.panels)
    if (chart !== u) chart.setScale("x", { min: u.scales.x.min, max: u.scales.x.max });
  following = false;
}

// Crosses where runs diverged.
function crosses(data, found, u) {
  const { ctx } = u, size = 5 * devicePixelRatio;
  for (const end of found.ends) {
    if (view.hidden.has(end.row)) continue;
    const x = u.valToPos(end.x, "x", true), y = u.valToPos(end.y, "y", true);
    if (!(y >= u.bbox.top && y <= u.bbox.top + u.bbox.height && x >= u.bbox.left && x <= u.bbox.left + u.bbox.width)) continue;
    ctx.save();
    ctx.strokeStyle = look(data, end.row).colour;
    ctx.lineWidth = 2.5 * devicePixelRatio;
    ctx.beginPath();
    ctx.moveTo(x - size, y - size); ctx.lineTo(x + size, y + size);
    ctx.moveTo(x - size, y + size); ctx.lineTo(x + size, y - size);
    ctx.stroke();
    ctx.restore();
  }
}

function keys(event, chart, found) {
  const { min, max } = chart.scales.x, middle = (min + max) / 2, wide = max - min;
  const zoom = (factor) => chart.setScale("x", { min: Math.max(found.xs[0], middle - (wide * factor) / 2), max: Math.min(found.xs.at(-1), middle + (wide * factor) / 2) });
  const move = (by) => {
    const last = found.xs.length - 1, now = chart.cursor.idx ?? (by > 0 ? -1 : last + 1);
    const left = chart.valToPos(found.xs[Math.min(last, Math.max(0, now + by))], "x");
    chart.setCursor({ left, top: 20 }, true, true);
  };
  const step = event.shiftKey ? Math.ceil(found.xs.length / 20) : 1;
  const acts = { ArrowRight: () => move(step), ArrowLeft: () => move(-step), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: resetZoom };
  if (!acts[event.key]) return;
  event.preventDefault();
  acts[event.key]();
}

function resetZoom() {
  for (const { chart, found } of view.panels) chart.setScale("x", { min: found.xs[0], max: found.xs.at(-1) });
}

// Redraw all panels, for example for another axis, smoothing or colours.
function drawCurves(data) {
  for (const { chart } of view.panels) chart.destroy();
  view.panels = [];
  for (const id of ["panels", "motion-panels"]) byId(id).replaceChildren();
  byId("curves").hidden = false;
  byId("motion").hidden = false;
  for (const panel of panelsOf(data)) draw(data, panel);
  byId("curves").hidden = !byId("panels").childElementCount;
  byId("motion").hidden = !byId("motion-panels").childElementCount;
}

// Extend the same curves in place, keeping zoom, hover and focus; false if the panels must be redrawn.
function refreshCurves(data) {
  const panels = panelsOf(data).map((panel) => [panel, series(data, panel)]).filter(([, found]) => found);
  const shape = (panel, found) => [panel.key, ...found.lines.map((l) => `${l.row}${l.bold}`)].join();
  const [before, after] = [view.panels.map((one) => shape(one.panel, one.found)), panels.map(([panel, found]) => shape(panel, found))];
  if (before.join(";") !== after.join(";") || view.panels.some(({ found }) => found.xs.length < 3)) return false;
  const zoom = zoomed();
  following = true;
  panels.forEach(([, found], i) => {
    Object.assign(view.panels[i].found, found);
    view.panels[i].chart.setData([found.xs, ...found.lines.map((l) => l.values)], false);
    view.panels[i].chart.setScale("x", zoom ?? { min: found.xs[0], max: found.xs.at(-1) });
  });
  following = false;
  return true;
}

// The part of the axis that is shown; null for all of it.
function zoomed() {
  if (!view.panels.length) return null;
  const { chart, found } = view.panels[0], { min, max } = chart.scales.x;
  return min > found.xs[0] || max < found.xs.at(-1) ? { min, max } : null;
}

// Hide or show methods without redrawing.
function showMethods() {
  for (const { chart, found } of view.panels) {
    chart.batch(() => found.lines.forEach((l, i) => {
      const show = !view.hidden.has(l.row);
      if (chart.series[i + 1].show !== show) chart.setSeries(i + 1, { show });
    }));
    chart.redraw(true, true);
  }
}

addEventListener("resize", () => {
  for (const { chart, box } of view.panels) if (box.clientWidth && box.clientWidth !== chart.width) chart.setSize({ width: box.clientWidth, height: 260 });
});
