// The split, participation, and the scores of the last model on each client's data.
const COLUMNS = 250, CLASSES = 100;

function drawSplits(data) {
  const names = Object.keys(data.splits), select = byId("which-split");
  const took = runsOf(data).some((run) => run.rounds);
  byId("split").hidden = !names.length && !took;
  select.closest(".controls").hidden = names.length < 2;
  const before = select.value;
  select.replaceChildren(...names.map((name) => make("option", { value: name }, data.splits[name].name)));
  if (names.includes(before)) select.value = before;
  select.onchange = () => splitPlot(data, select.value);
  splitPlot(data, select.value);
  participation(data);
}

// At most so many columns; more are added up in bins.
function binned(values, most) {
  const size = Math.ceil(values.length / most), bins = [];
  for (let i = 0; i < values.length; i += size) bins.push(values.slice(i, i + size).reduce((a, b) => a + b, 0));
  return { bins, size };
}

function splitPlot(data, name) {
  const split = data.splits[name], parts = [];
  const run = runsOf(data).find((one) => one.rounds && (!split || one.split === name)) ?? runsOf(data).find((one) => one.rounds);
  if (split) parts.push(make("p", { class: "note" }, `${split.name}: ${split.samples} samples at ${split.clients} clients`));
  else parts.push(make("p", { class: "note" }, "These runs have no record of their split (split.json)."));
  const strips = [];
  if (split?.counts.length) strips.push(...heat(split));
  if (split?.sizes.length) strips.push(make("div", { class: "title" }, "samples"), bars(split.sizes, "samples"));
  if (run && run.took_part.each !== null) {
    const each = spread(data.columns[run.took_part.each], run.took_part.clients);
    strips.push(make("div", { class: "title" }, "rounds taken part in"), bars(each, "rounds"));
  }
  if (strips.length) {
    const clients = split?.clients ?? run.took_part.clients;
    strips.push(make("div"), make("div", {}, `clients 0 to ${clients - 1}`));
    parts.push(make("div", { class: "strip" }, ...strips));
  }
  if (split?.counts.length) {
    const most = Math.max(...split.counts.flat());
    parts.push(make("div", { class: "key" }, "0", make("i"), `${most} samples of a class at a client`));
  }
  if (run && run.took_part.each === null) {
    const times = run.took_part.times.slice(0, 40).map(([k, n]) => `${n} clients ${k} times`).join(", ");
    parts.push(make("p", { class: "note" }, `Took part: ${times}`));
  }
  byId("split-plot").replaceChildren(...parts);
}

function heat(split) {
  const classes = Math.min(CLASSES, split.counts[0].length), height = Math.max(3, Math.min(18, Math.round(320 / classes)));
  const most = Math.max(1, ...split.counts.flat()), svg = make("svg", { height: classes * height, role: "img", "aria-label": "samples of every class at every client" });
  for (let c = 0; c < classes; c++) {
    const { bins, size } = binned(split.counts.map((row) => row[c]), COLUMNS), wide = 100 / bins.length;
    bins.forEach((value, i) => {
      if (!value) return;
      const where = size > 1 ? `clients ${i * size} to ${(i + 1) * size - 1}` : `client ${i}`;
      const name = split.classes[c] ?? `class ${c}`;
      const opacity = Math.min(1, 0.08 + 0.92 * Math.sqrt(value / (most * size)));
      svg.append(make("rect", { class: "cell", x: `${i * wide}%`, y: c * height, width: `${wide}%`, height: Math.max(1, height - 1), "fill-opacity": opacity.toFixed(3) }, make("title", {}, `${where}, ${name}: ${value}`)));
    });
  }
  const labels = make("div", { class: "classes" });
  if (classes <= 30) for (let c = 0; c < classes; c++) labels.append(make("span", {}, split.classes[c] ?? `class ${c}`));
  else labels.append(make("span", {}, `${split.counts[0].length} classes`));
  return [labels, svg];
}

function bars(values, unit) {
  const { bins, size } = binned(values, COLUMNS), most = Math.max(1, ...bins), wide = 100 / bins.length;
  const svg = make("svg", { height: 54, role: "img", "aria-label": `${unit} per client, at most ${most}` });
  bins.forEach((value, i) => {
    const tall = (40 * value) / most, where = size > 1 ? `clients ${i * size} to ${(i + 1) * size - 1}` : `client ${i}`;
    svg.append(make("rect", { class: "barred", x: `${i * wide + wide * 0.08}%`, y: 54 - tall, width: `${wide * 0.84}%`, height: tall }, make("title", {}, `${where}: ${value} ${unit}`)));
  });
  svg.append(make("text", { x: 0, y: 10 }, `up to ${most}`));
  return svg;
}

function participation(data) {
  const total = (run, name) => (column(data, run, name) ?? []).reduce((a, b) => a + b, 0);
  const lines = data.rows.map((row) => {
    const runs = row.runs.filter((run) => run.rounds), over = (f) => runs.reduce((sum, run) => sum + f(run), 0);
    const rounds = over((run) => run.rounds), active = over((run) => total(run, "cohort"));
    const share = (name) => (active ? `${over((run) => total(run, name))} (${((100 * over((run) => total(run, name))) / active).toFixed(1)}%)` : "–");
    const never = runs.map((run) => run.took_part.times.find(([k]) => k === 0)?.[1] ?? 0);
    return [row.label, rounds ? (active / rounds).toFixed(1) : "–", share("dropped"), share("stragglers"), never.length ? String(Math.max(...never)) : "–"];
  });
  const alike = new Set(lines.map((line) => line.slice(1).join("|"))).size === 1;
  const shown = alike && lines.length > 1 ? [["all methods", ...lines[0].slice(1)]] : lines;
  byId("participation").replaceChildren(make("h3", {}, "Participation"), tableOf(["method", "active per round", "dropped", "stragglers", "never took part"], shown));
}

const quantiles = Array.from({ length: 101 }, (_, i) => i);
const average = (values) => values.reduce((a, b) => a + b, 0) / values.length;

// The models that are scored on every client's data; the first and the last are drawn, all are in the table.
const scored = { "": "", own_: ", own models of the clients of that round", personalised_: ", personalised by local steps" };
const onData = { train: "on their training data", test: "on their own test data" };

function clientScores(data, name, meet = () => {}) {
  return data.rows.map((row) => {
    const found = row.runs.filter((run) => run.clients?.[name]?.some((a) => a !== null)), over = found.filter((run) => run.done);
    return (over.length ? over : found).map((run) => {
      meet(run.clients);
      return run.clients[name].filter((a) => a !== null).sort((a, b) => a - b);
    });
  });
}

function drawFairness(data) {
  const key = runsOf(data).some((run) => run.clients?.accuracy.some((a) => a !== null)) ? "accuracy" : "loss";
  const rounds = new Set(), on = new Set();
  const rows = clientScores(data, key, (clients) => { rounds.add(clients.round); on.add(onData[clients.on] ?? clients.on); });
  byId("fairness").hidden = !rows.some((runs) => runs.length);
  if (byId("fairness").hidden) return;
  const scale = key === "accuracy" ? 100 : 1, [first, last] = [Math.min(...rounds), Math.max(...rounds)];
  const when = first === last ? `after round ${last}` : `as last measured, after rounds ${first} to ${last}: not the same stage of training`;
  const where = on.size > 1 ? `${[...on].join(" or ")} (not the same in all runs)` : [...on][0];
  byId("fairness-note").textContent = `Clients from the worst served to the best: ${key} of the server model ${where}, ${when}. A flat, ${key === "accuracy" ? "high" : "low"} curve is fair.`;
  const at = (sorted) => {
    const order = key === "accuracy" ? sorted : [...sorted].reverse();
    return quantiles.map((q) => order[Math.min(order.length - 1, Math.floor((q / 100) * order.length))] * scale);
  };
  const lines = (rows) => rows.flatMap((runs, i) => view.hidden.has(i) ? [] : [
    ...(runs.length > 1 ? runs.map((run) => ({ row: i, bold: false, values: at(run) })) : []),
    ...(runs.length ? [{ row: i, bold: true, values: mean(runs.map(at)) }] : [])]).sort((a, b) => a.bold - b.bold);
  const tuned = clientScores(data, `personalised_${key}`), title = key === "accuracy" ? "Accuracy (%)" : "Loss";
  fairnessPlots(data, [[title, lines(rows)], ...(tuned.some((runs) => runs.length) ? [[`${title}, personalised by local steps`, lines(tuned)]] : [])]);
  fairnessTable(data, key, scale);
}

function fairnessTable(data, key, scale) {
  const cells = (f) => (runs) => (runs.length ? (average(runs.map(f)) * scale).toFixed(scale === 100 ? 2 : 4) : "–");
  const part = (sorted, share) => sorted.slice(0, Math.max(1, Math.round(sorted.length * share)));
  const bad = (sorted) => part(key === "accuracy" ? sorted : [...sorted].reverse(), 0.1);
  const good = (sorted) => part(key === "accuracy" ? [...sorted].reverse() : sorted, 0.1);
  const middle = (a) => (a[Math.floor((a.length - 1) / 2)] + a[Math.ceil((a.length - 1) / 2)]) / 2;
  const deviation = (a) => Math.sqrt(average(a.map((v) => (v - average(a)) ** 2)));
  const columns = [average, (a) => average(bad(a)), middle, (a) => average(good(a)), deviation].map(cells);
  const lines = Object.entries(scored).map(([kind, says]) => clientScores(data, kind + key).map((runs, i) =>
    runs.length ? [data.rows[i].label + says, ...columns.map((f) => f(runs))] : null));
  byId("fairness-table").replaceChildren(tableOf(["method", "mean over clients", "worst 10%", "median", "best 10%", "spread (sd)"],
    data.rows.flatMap((_, i) => lines.map((kind) => kind[i])).filter((line) => line)));
}

// Side by side, on one scale; all boxes are there before the first is drawn, since they share the width.
function fairnessPlots(data, panels) {
  const boxes = panels.map(([title]) => make("div", { class: "plot", role: "img", "aria-label": `${title} of clients, sorted` }));
  byId("fairness-plot").replaceChildren(...panels.map(([title], i) => make("figure", {}, make("figcaption", {}, title), boxes[i])));
  const values = panels.flatMap(([, lines]) => lines.flatMap((l) => l.values));
  const [low, high] = values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], values.length ? [values[0], values[0]] : [0, 1]);
  const range = uPlot.rangeNum(low, high, 0.1, true);
  panels.forEach(([, lines], i) => fairnessPlot(data, lines, boxes[i], range));
}

function fairnessPlot(data, lines, box, range) {
  const ink = css("--soft"), line = css("--line"), axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, size: 5 }, font: "12px system-ui, sans-serif" };
  new uPlot({
    width: box.clientWidth || 500, height: 260, legend: { show: false }, cursor: { show: false }, scales: { x: { time: false }, y: { range: () => range } },
    series: [{}, ...lines.map(({ row, bold }) => ({ stroke: look(data, row).colour + (bold ? "" : "66"), width: bold ? 2.4 : 1, dash: bold && look(data, row).dash.length ? look(data, row).dash : undefined, points: { show: false } }))],
    axes: [{ ...axis, label: "clients, worst first (%)", labelSize: 20, labelFont: axis.font, size: 34 }, { ...axis, size: 58 }],
  }, [quantiles, ...lines.map((l) => l.values)], box);
}
