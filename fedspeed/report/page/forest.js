// Paired differences to a baseline, with their intervals.
const MEASURES = { mean_last5_accuracy: "last-5 mean accuracy", last_accuracy: "last accuracy", last_test_loss: "test loss" };

function drawForest(data) {
  const baselines = Object.keys(data.gaps), chosen = byId("baseline"), measure = byId("measure");
  const found = baselines.some((name) => data.gaps[name].length);
  byId("forest").hidden = !found;
  if (!found) return;
  const metrics = [...new Set(Object.values(data.gaps).flat().map((gap) => gap.metric))];
  const before = [chosen.value, measure.value];
  chosen.replaceChildren(...baselines.map((name) => make("option", { value: name }, name)));
  measure.replaceChildren(...metrics.map((name) => make("option", { value: name }, MEASURES[name] ?? name)));
  chosen.value = baselines.includes(before[0]) ? before[0] : data.baseline;
  measure.value = metrics.includes(before[1]) ? before[1] : metrics[0];
  chosen.onchange = measure.onchange = () => forestRows(data, chosen.value, measure.value);
  forestRows(data, chosen.value, measure.value);
}

function forestRows(data, baseline, metric) {
  const gaps = data.gaps[baseline].filter((gap) => gap.metric === metric);
  const points = metric.includes("accuracy"), scale = points ? 100 : 1, digits = points ? 2 : 4;
  const [low, high] = forestRange(gaps, scale), at = (value) => (100 * (value - low)) / (high - low);
  const cells = [];
  for (const gap of gaps) {
    const row = data.rows.findIndex((one) => one.label === gap.method);
    const side = gap.answer.endsWith("better") ? " better" : gap.answer.endsWith("worse") ? " worse" : "";
    const numbers = gap.mean === null ? "–" : signed(gap.mean * scale, digits);
    const bounds = gap.low === null ? "" : ` [${signed(gap.low * scale, digits)}, ${signed(gap.high * scale, digits)}]`;
    cells.push(
      make("div", { class: "name" }, gap.method),
      make("div", {}, strip(data, gap, row, at, scale)),
      make("div", { class: `what${side}` }, numbers + bounds, make("small", {}, gap.answer)));
  }
  const unit = points ? "points" : "loss";
  const ends = [`← ${points ? "worse" : "better"} than ${baseline}`, `${points ? "better" : "worse"}, in ${unit} →`];
  cells.push(make("div", { class: "last pad" }), make("div", { class: "last" }, scaleOf(low, high, at)), make("div", { class: "last pad" }));
  const note = make("p", { class: "note" }, `${ends[0]}   |   ${ends[1]}`);
  byId("forest-plot").replaceChildren(make("div", { class: "forest" }, ...cells), note);
}

// A range with zero and all seeds, and the intervals unless they would make everything else small.
function forestRange(gaps, scale) {
  const seen = gaps.flatMap((gap) => gap.values.map((value) => value * scale));
  const most = Math.max(1e-9, ...seen.map(Math.abs)) * 2.2;
  const ends = gaps.flatMap((gap) => [gap.low, gap.high]).filter((end) => end !== null).map((end) => Math.max(-most, Math.min(most, end * scale)));
  const low = Math.min(0, ...seen, ...ends), high = Math.max(0, ...seen, ...ends), room = (high - low || 1) * 0.05;
  return [low - room, high + room];
}

function strip(data, gap, row, at, scale) {
  const { colour } = look(data, row), x = (value) => `${at(value * scale)}%`;
  const svg = make("svg", { role: "img", "aria-label": `${gap.method}: ${gap.answer}` });
  svg.append(make("line", { class: "zero", x1: `${at(0)}%`, x2: `${at(0)}%`, y1: 0, y2: "100%" }));
  if (gap.low !== null) {
    const [left, right] = [Math.max(0, at(gap.low * scale)), Math.min(100, at(gap.high * scale))];
    svg.append(make("line", { x1: `${left}%`, x2: `${right}%`, y1: "50%", y2: "50%", stroke: colour, "stroke-width": 3 }));
    for (const [end, out, sign] of [[left, at(gap.low * scale) < 0, "‹"], [right, at(gap.high * scale) > 100, "›"]])
      svg.append(out ? make("text", { x: `${end}%`, y: "64%", "text-anchor": "middle" }, sign)
        : make("line", { x1: `${end}%`, x2: `${end}%`, y1: "36%", y2: "64%", stroke: colour, "stroke-width": 2 }));
  }
  gap.values.forEach((value, i) =>
    svg.append(make("circle", { cx: x(value), cy: "76%", r: 2.6, fill: colour, opacity: 0.65 }, make("title", {}, `seed ${gap.seeds[i]}: ${signed(value * scale, 3)}`))));
  if (gap.mean !== null) svg.append(make("circle", { cx: x(gap.mean), cy: "50%", r: 6, fill: colour, stroke: css("--card"), "stroke-width": 1.5 }));
  return svg;
}

function scaleOf(low, high, at) {
  const raw = (high - low) / 5, power = 10 ** Math.floor(Math.log10(raw)), step = [1, 2, 5, 10].find((k) => k * power >= raw) * power;
  const svg = make("svg", { "aria-hidden": "true" });
  for (let k = Math.ceil(low / step); k * step <= high; k++) {
    const x = `${at(k * step)}%`;
    svg.append(make("line", { class: "grid", x1: x, x2: x, y1: 0, y2: 6 }), make("text", { x, y: 20, "text-anchor": "middle" }, figures(k * step)));
  }
  return svg;
}
