// Why it was forgotten: the overlap of tasks, and what follows from it.
const analysed = () => entries().filter((e) => e.analysis);
const pairKey = () => `${state.source}-${state.target}`;
const spectrum = (entry, key = pairKey()) => entry.analysis.overlap[key];
const statistics = [(values) => d3.max(values), (values) => d3.mean(values)];
const statisticNames = ["largest singular value", "mean singular value"];

function chooser(name, chosen, names, change) {
  const select = el("select", { id: `choose-${name.replaceAll(" ", "-")}`, onchange: (event) => { change(Number(event.target.value)); redraw(); document.getElementById(event.target.id).focus(); } },
    names.map((text, value) => (text == null ? null : el("option", { value, selected: value === chosen }, text))));
  return el("label", {}, name, select);
}

function drawSpectrum(box, width) {
  const data = analysed().flatMap((e) => (spectrum(e) || []).map((v, i) => ({ e, i: i + 1, v })));
  if (!data.length) {
    box.append(el("p", { class: "soft" }, "No run that is shown has learned both of these tasks."));
    return;
  }
  box.append(plot(width, `Singular values of the overlap of ${taskName(state.source)} and ${taskName(state.target)}, by method`, {
    height: 270, x: { label: "direction", labelArrow: "none", tickFormat: "d", ticks: 6 }, y: { domain: [0, 1], label: "singular value", labelArrow: "none", grid: true, tickSize: 0, ticks: 5 },
    marks: [
      ...analysed().map((e) => Plot.line(data.filter((d) => d.e === e), { x: "i", y: "v", stroke: colour(e), strokeWidth: 1.7, strokeDasharray: dash(e) })),
      tip(data, { x: "i", y: "v", title: (d) => `${clipped(d.e.label, 40)}\nsingular value ${d.i}: ${three(d.v)}\nlargest ${three(spectrum(d.e)[0])}, mean ${three(d3.mean(spectrum(d.e)))}` }),
    ],
  }));
}

function overlaps(entry) {
  return Object.entries(entry.analysis.overlap).map(([key, values]) => {
    const [s, k] = key.split("-").map(Number);
    return { entry, s, k, largest: statistics[0](values), mean: statistics[1](values), v: statistics[state.statistic](values) };
  });
}

function drawOverlapMaps(box) {
  const colours = { type: "linear", scheme: "magma", domain: [0, 1], label: statisticNames[state.statistic] };
  box.append(el("div", { class: "legend" }, Plot.legend({ color: colours, width: 200, marginLeft: 10, style: { background: "none" } })));
  const grid = el("div", { class: "maps" });
  box.append(grid);
  for (const entry of analysed()) {
    const cell = el("div", { class: "map" });
    grid.append(cell);
    const width = Math.min(cell.clientWidth, 320);
    const data = overlaps(entry);
    const count = entry.analysis.learned;
    const side = (from) => ({ domain: d3.range(from, from + count - 1), ticks: ticks(count, 8).filter((n) => n >= from && n < from + count - 1), tickSize: 0, padding: 0.04, labelAnchor: "center", labelArrow: "none" });
    cell.append(plot(width, `Overlap of each task with each later one, ${entry.label}`, {
      height: width - 4, marginTop: 24, marginLeft: 36, marginRight: 6,
      x: { ...side(1), label: "earlier task" }, y: { ...side(2), label: "later task" }, color: { ...colours, label: undefined },
      marks: [
        Plot.text([clipped(entry.label, 30)], { frameAnchor: "top-left", dy: -18, fontWeight: 600, fontSize: 12 }),
        Plot.cell(data, { x: (d) => d.s + 1, y: (d) => d.k + 1, fill: "v" }),
        (width - 42) / (count - 1) >= 25 ? Plot.text(data, { x: (d) => d.s + 1, y: (d) => d.k + 1, text: (d) => d3.format(".2f")(d.v), fill: (d) => inkOn(d3.interpolateMagma(d.v)), fontSize: 10.5 }) : null,
        tip(data, { x: (d) => d.s + 1, y: (d) => d.k + 1, maxRadius: 40, title: (d) => `${clipped(entry.label, 40)}\n${taskName(d.s)} and ${taskName(d.k)}\nlargest ${three(d.largest)}, mean ${three(d.mean)}` }),
      ],
    }));
  }
}

function drawVariance(box, width) {
  const withCurve = analysed().filter((e) => e.analysis.variance[state.source]);
  const data = withCurve.flatMap((e) => e.analysis.variance[state.source].curve.map((v, i) => ({ e, i: i + 1, v: 100 * v })));
  const kept = withCurve.flatMap((e) => {
    const { kept: count, curve } = e.analysis.variance[state.source];
    return count ? [{ e, i: Math.min(count, curve.length), count, v: 100 * curve[Math.min(count, curve.length) - 1] }] : [];
  });
  box.append(plot(width, `Variance of the features of ${taskName(state.source)} explained by their first directions, by method`, {
    height: 270, x: { type: "log", label: "directions", labelArrow: "none", ticks: [1, 3, 10, 30, 100, 300, 1000].filter((n) => n <= d3.max(data, (d) => d.i)), tickFormat: "d", tickSize: 3 }, y: { domain: [0, 100], label: "explained variance, %", labelArrow: "none", grid: true, tickSize: 0, ticks: 5 },
    marks: [
      ...withCurve.map((e) => Plot.line(data.filter((d) => d.e === e), { x: "i", y: "v", stroke: colour(e), strokeWidth: 1.7, strokeDasharray: dash(e) })),
      Plot.ruleX(kept, { x: "i", y1: 0, y2: "v", stroke: (d) => d.e.label, strokeDasharray: "2 3" }),
      Plot.dot(kept, { x: "i", y: "v", r: 4.5, fill: (d) => d.e.label, stroke: "var(--card)", strokeWidth: 1.5 }),
      tip([...data, ...kept], { x: "i", y: "v", title: (d) => `${clipped(d.e.label, 40)}\n${plural(d.i, "direction")}: ${two(d.v)} %${d.count ? `\n${d.count} are kept of this task` : ""}` }),
    ],
    color: byLabel(),
  }));
}
const byLabel = () => ({ domain: group().entries.map((e) => e.label), range: group().entries.map(colour) });

function forecasts() {
  return analysed().flatMap((e) => e.analysis.forecast.map((f) => ({ e, ...f })));
}

function drawForecast(box, width) {
  const data = forecasts();
  const ends = d3.extent(data.flatMap((d) => [d.predicted, d.measured, 0]));
  const reach = [Math.floor(ends[0] - 1), Math.ceil(ends[1] + 1)];
  box.append(plot(width, "Change of accuracy that was forecast against the one that was measured", {
    height: 300, grid: true, x: { domain: reach, label: "forecast change, points", labelArrow: "none", ticks: 5, tickSize: 0 }, y: { domain: reach, label: "measured change, points", labelArrow: "none", ticks: 5, tickSize: 0 },
    color: byLabel(),
    marks: [
      Plot.line([[reach[0], reach[0]], [reach[1], reach[1]]], { stroke: "var(--soft)", strokeDasharray: "4 4", strokeOpacity: 0.7 }),
      Plot.dot(data, { x: "predicted", y: "measured", fill: (d) => d.e.label, fillOpacity: (d) => (d.trusted ? 0.9 : 0.3), stroke: (d) => d.e.label, r: 4.5 }),
      tip(data, { x: "predicted", y: "measured", title: (d) => `${clipped(d.e.label, 40)}\n${taskName(d.source)} while ${taskName(d.target)} was learned\nforecast ${two(d.predicted)}, measured ${two(d.measured)}\ntrust ${two(d.trust)}` }),
    ],
  }));
}

function drawKernel(box, width) {
  const data = analysed().flatMap((e) => (e.analysis.kernel[state.source] || []).map((v, i) => ({ e, t: state.source + i, v })));
  if (!data.length) {
    box.append(el("p", { class: "soft" }, "No analysed run has learned this task."));
    return;
  }
  box.append(plot(width, `Change of the tangent kernel of ${taskName(state.source)} while later tasks were learned, by method`, {
    height: 270, x: { domain: d3.range(state.source + 1, group().learned + 1), type: "point", label: "after task", labelArrow: "none", tickSize: 0, ticks: ticks(group().learned, 10).filter((t) => t > state.source) },
    y: { label: "relative change of the kernel", labelArrow: "none", grid: true, zero: true, tickSize: 0, ticks: 5 },
    marks: [
      ...analysed().flatMap((e) => {
        const own = data.filter((d) => d.e === e);
        return [Plot.line(own, { x: (d) => d.t + 1, y: "v", stroke: colour(e), strokeWidth: 1.7, strokeDasharray: dash(e) }), Plot.dot(own, { x: (d) => d.t + 1, y: "v", fill: colour(e), r: 2.2 })];
      }),
      tip(data, { x: (d) => d.t + 1, y: "v", title: (d) => `${clipped(d.e.label, 40)}\nafter ${taskName(d.t)}: ${three(d.v)}` }),
    ],
  }));
}

const withImages = () => analysed().filter((e) => Object.keys(e.analysis.images.pictures).length);

function drawImages(box) {
  const entry = withImages().find((e) => e.label === state.pictured) || withImages()[0];
  if (!entry) return;
  const { pictures, endangered, forgotten } = entry.analysis.images;
  const rows = [["Most endangered, by the forecast before the next task", endangered], ["Most forgotten, from when the task was learned to the end", forgotten]];
  for (const [title, lists] of rows) {
    const list = lists[state.source] || [];
    box.append(el("p", { class: "soft" }, title));
    box.append(list.length ? el("div", { class: "row" }, list.map(({ id, label, guess }) =>
      el("figure", { class: "sample" }, el("img", { src: pictures[id], alt: `test image ${id} of class ${label}` }), `${label} → ${guess}`)))
      : el("p", {}, "none of this task"));
  }
}

function drawWhy(section) {
  const { tasks, learned } = group();
  const folders = group().folders.length ? group().folders.map((f) => (/^[\w./-]+$/.test(f) ? f : `'${f.replaceAll("'", "'\\''")}'`)).join(" ") : "DIR";
  section.append(
    el("h2", { id: "why-title" }, "Why it was forgotten"),
    el("p", { class: "soft" }, "What a task pushes out of the network is decided by how much its directions in the space of the weights overlap with those of the tasks before it. A method helps as far as it takes that overlap away."));
  const known = group().entries.filter((e) => e.analysis);
  const place = el("div", { class: "panels" });
  const pair = learned > 1 && known.length > 0;
  if (pair) {
    const reach = d3.max(known, (e) => e.analysis.learned);
    const names = (from, to) => tasks.map((_, t) => (from <= t && t < to ? taskName(t) : null));
    section.append(el("div", { class: "choices", role: "group", "aria-label": "Tasks that the figures are about" },
      chooser("earlier task", state.source, names(0, reach - 1), (t) => { state.source = t; state.target = Math.max(state.target, t + 1); }),
      chooser("later task", state.target, names(state.source + 1, reach), (t) => { state.target = t; })));
  }
  section.append(place);
  const how = known.length ? `Seed ${known[0].analysis.seed}, ${known[0].analysis.samples} samples of each task.` : "";
  const lacking = known.length ? null : "This needs the weights that the runs went through, which have not been analysed.";
  if (lacking) {
    section.append(el("p", {}, "To fill these panels in, where the runs kept their weights and the data is on disk:"), copyable(`forgetless report --analyse ${folders}`));
  }
  const few = learned > 1 ? null : "It takes two learned tasks to have an overlap.";
  panel(place, { id: "spectrum", title: "Overlap of the two tasks", text: `Singular values of O = V₁ T V₂ᵀ: 1 is a direction that both tasks need and nothing protects, 0 one that they do not share. ${how}`, draw: drawSpectrum, missing: lacking || few,
    table: () => ({ columns: ["method", "earlier_task", "later_task", "number", "singular_value"], rows: analysed().flatMap((e) => Object.entries(e.analysis.overlap).flatMap(([key, values]) => values.map((v, i) => [e.label, ...key.split("-").map((n) => Number(n) + 1), i + 1, v]))) }) });
  panel(place, { id: "variance", title: "Explained variance of the earlier task", text: "How much of its tangent features the first directions hold; a point marks how many directions the method keeps.", draw: drawVariance, missing: lacking,
    table: () => ({ columns: ["method", "task", "directions", "explained_variance"], rows: analysed().flatMap((e) => e.analysis.variance.flatMap((item, t) => item.curve.map((v, i) => [e.label, t + 1, i + 1, v]))) }) });
  const statistic = el("div", { class: "choices" }, chooser("shown", state.statistic, statisticNames, (n) => { state.statistic = n; }));
  panel(place, { id: "overlaps", wide: true, title: "Overlap of every pair of tasks", text: "Each cell is one pair, as the method has it when the later task starts.", draw: drawOverlapMaps, missing: lacking || few, choices: statistic,
    table: () => ({ columns: ["method", "earlier_task", "later_task", "largest", "mean"], rows: analysed().flatMap((e) => overlaps(e).map((d) => [e.label, d.s + 1, d.k + 1, d.largest, d.mean])) }) });
  const noForecast = known.some((e) => e.analysis.forecast.length) ? null : "None of these methods can be forecast: the forecast knows plain SGD and methods that project.";
  panel(place, { id: "forecast", title: "Forecast against measured", text: "What the linearised network said that the next task would do to a task's accuracy, and what it did. On the dashed line both agree; pale points were not to be trusted.", draw: drawForecast, missing: lacking || few || noForecast,
    table: () => ({ columns: ["method", "source_task", "target_task", "forecast_change", "measured_change", "trust"], rows: forecasts().map((d) => [d.e.label, d.source + 1, d.target + 1, d.predicted, d.measured, d.trust]) }) });
  panel(place, { id: "kernel", title: "How far the kernel moved", text: "‖K′ − K‖ / ‖K‖ on the earlier task: the theory takes it for 0. The more it moves, the less the overlap explains.", draw: drawKernel, missing: lacking,
    table: () => ({ columns: ["method", "task", "after_task", "relative_change"], rows: analysed().flatMap((e) => e.analysis.kernel.flatMap((list, s) => list.map((v, i) => [e.label, s + 1, s + i + 1, v]))) }) });
  const pictured = withImages();
  const whose = pictured.length > 1 ? el("div", { class: "choices" }, chooser("method", Math.max(0, pictured.findIndex((e) => e.label === state.pictured)), pictured.map((e) => clipped(e.label, 40)), (n) => { state.pictured = withImages()[n].label; })) : null;
  panel(place, { id: "images", wide: true, drawn: false, title: "Images of the earlier task", text: "Test images that were right when the task was learned: their class, and what the network takes them for.", draw: drawImages, choices: whose,
    missing: lacking || (known.some((e) => Object.keys(e.analysis.images.pictures).length) ? null : "There are no images to show: nothing was forgotten, or the tasks are not images."),
    table: () => ({ columns: ["method", "task", "kind", "test_image", "class", "taken_for"], rows: withImages().flatMap((e) => ["endangered", "forgotten"].flatMap((kind) => Object.entries(e.analysis.images[kind]).flatMap(([t, list]) => list.map((i) => [e.label, Number(t) + 1, kind, i.id, i.label, i.guess])))) }) });
}
