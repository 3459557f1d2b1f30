// The overlap of tasks: of one pair, and of all pairs.
const analysed = () => entries().filter((e) => e.analysis);
const pairKey = () => `${state.source}-${state.target}`;
const spectrum = (entry, key = pairKey()) => entry.analysis.overlap[key];
const statistics = [(values) => d3.max(values), (values) => d3.mean(values)];
const statisticNames = ["largest singular value", "mean singular value", "unprotected share of the earlier task"];

function chooser(name, chosen, names, change) {
  const select = el(
    "select",
    {
      id: `choose-${name.replaceAll(" ", "-")}`,
      onchange: (event) => {
        change(Number(event.target.value));
        redraw();
        document.getElementById(event.target.id).focus();
      },
    },
    names.map((text, value) => (text == null ? null : el("option", { value, selected: value === chosen }, text))),
  );
  return el("label", {}, name, select);
}

function drawSpectrum(box, width) {
  const data = analysed().flatMap((e) => (spectrum(e) || []).map((v, i) => ({ e, i: i + 1, v })));
  if (!data.length) {
    box.append(el("p", { class: "soft" }, "No run that is shown has learned both of these tasks."));
    return;
  }
  box.append(
    plot(
      width,
      `Singular values of the overlap of ${taskName(state.source)} and ${taskName(state.target)}, by method`,
      {
        height: 270,
        x: { label: "direction", labelArrow: "none", tickFormat: "d", ticks: 6 },
        y: { domain: [0, 1], label: "singular value", labelArrow: "none", grid: true, tickSize: 0, ticks: 5 },
        marks: [
          ...analysed().map((e) =>
            Plot.line(
              data.filter((d) => d.e === e),
              { x: "i", y: "v", stroke: colour(e), strokeWidth: 1.7, strokeDasharray: dash(e) },
            ),
          ),
          tip(data, {
            x: "i",
            y: "v",
            title: (d) =>
              `${clipped(d.e.label, 40)}\nsingular value ${d.i}: ${three(d.v)}\nlargest ${three(spectrum(d.e)[0])}, mean ${three(d3.mean(spectrum(d.e)))}`,
          }),
        ],
      },
    ),
  );
}

function overlaps(entry) {
  return Object.entries(entry.analysis.overlap).map(([key, values]) => {
    const [s, k] = key.split("-").map(Number);
    return {
      entry,
      s,
      k,
      largest: statistics[0](values),
      mean: statistics[1](values),
      unprotected: entry.analysis.unprotected[key],
      v: state.statistic < 2 ? statistics[state.statistic](values) : entry.analysis.unprotected[key],
    };
  });
}

function drawOverlapMaps(box) {
  const colours = { type: "linear", scheme: "magma", domain: [0, 1], label: statisticNames[state.statistic] };
  box.append(
    el(
      "div",
      { class: "legend" },
      Plot.legend({ color: colours, width: 200, marginLeft: 10, style: { background: "none" } }),
    ),
  );
  const grid = el("div", { class: "maps" });
  box.append(grid);
  for (const entry of analysed()) {
    const cell = el("div", { class: "map" });
    grid.append(cell);
    const width = Math.min(cell.clientWidth, 320);
    const data = overlaps(entry);
    const count = entry.analysis.learned;
    const side = (from) => ({
      domain: d3.range(from, from + count - 1),
      ticks: ticks(count, 8).filter((n) => n >= from && n < from + count - 1),
      tickSize: 0,
      padding: 0.04,
      labelAnchor: "center",
      labelArrow: "none",
    });
    cell.append(
      plot(width, `Overlap of each task with each later one, ${entry.label}`, {
        height: width - 4,
        marginTop: 24,
        marginLeft: count > 9 ? 42 : 36,
        marginRight: 6,
        x: { ...side(1), label: "earlier task" },
        y: { ...side(2), label: "later task" },
        color: { ...colours, label: undefined },
        marks: [
          Plot.text([clipped(entry.label, 30)], { frameAnchor: "top-left", dy: -18, fontWeight: 600, fontSize: 12 }),
          Plot.cell(data, { x: (d) => d.s + 1, y: (d) => d.k + 1, fill: "v" }),
          (width - 42) / (count - 1) >= 25
            ? Plot.text(data, {
                x: (d) => d.s + 1,
                y: (d) => d.k + 1,
                text: (d) => d3.format(".2f")(d.v),
                fill: (d) => inkOn(d3.interpolateMagma(d.v)),
                fontSize: 10.5,
              })
            : null,
          tip(data, {
            x: (d) => d.s + 1,
            y: (d) => d.k + 1,
            maxRadius: 40,
            title: (d) =>
              `${clipped(entry.label, 40)}\n${taskName(d.s)} and ${taskName(d.k)}\nlargest ${three(d.largest)}, mean ${three(d.mean)}\nunprotected ${three(d.unprotected)}`,
          }),
        ],
      }),
    );
  }
}
