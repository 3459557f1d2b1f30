// Explained variance, forecast, change of the kernel, and images.
function drawVariance(box, width) {
  const withCurve = analysed().filter((e) => e.analysis.variance[state.source]);
  const data = withCurve.flatMap((e) =>
    e.analysis.variance[state.source].curve.map((v, i) => ({ e, i: i + 1, v: 100 * v })),
  );
  const kept = withCurve.flatMap((e) => {
    const { kept: count, curve } = e.analysis.variance[state.source];
    return count
      ? [{ e, i: Math.min(count, curve.length), count, v: 100 * curve[Math.min(count, curve.length) - 1] }]
      : [];
  });
  box.append(
    plot(
      width,
      `Variance of the features of ${taskName(state.source)} explained by their first directions, by method`,
      {
        height: 270,
        x: {
          type: "log",
          label: "directions",
          labelArrow: "none",
          ticks: [1, 3, 10, 30, 100, 300, 1000].filter((n) => n <= d3.max(data, (d) => d.i)),
          tickFormat: "d",
          tickSize: 3,
        },
        y: { domain: [0, 100], label: "explained variance, %", labelArrow: "none", grid: true, tickSize: 0, ticks: 5 },
        marks: [
          ...withCurve.map((e) =>
            Plot.line(
              data.filter((d) => d.e === e),
              { x: "i", y: "v", stroke: colour(e), strokeWidth: 1.7, strokeDasharray: dash(e) },
            ),
          ),
          Plot.ruleX(kept, { x: "i", y1: 0, y2: "v", stroke: (d) => d.e.label, strokeDasharray: "2 3" }),
          Plot.dot(kept, { x: "i", y: "v", r: 4.5, fill: (d) => d.e.label, stroke: "var(--card)", strokeWidth: 1.5 }),
          tip([...data, ...kept], {
            x: "i",
            y: "v",
            title: (d) =>
              `${clipped(d.e.label, 40)}\n${plural(d.i, "direction")}: ${two(d.v)} %${d.count ? `\n${d.count} are kept of this task` : ""}`,
          }),
        ],
        color: byLabel(),
      },
    ),
  );
}
const byLabel = () => ({ domain: group().entries.map((e) => e.label), range: group().entries.map(colour) });

function forecasts() {
  return analysed().flatMap((e) => e.analysis.forecast.map((f) => ({ e, ...f })));
}

function drawForecast(box, width) {
  const data = forecasts();
  const ends = d3.extent(data.flatMap((d) => [d.predicted, d.measured, 0]));
  const reach = [Math.floor(ends[0] - 1), Math.ceil(ends[1] + 1)];
  box.append(
    plot(width, "Change of accuracy that was forecast against the one that was measured", {
      height: 300,
      grid: true,
      x: { domain: reach, label: "forecast change, points", labelArrow: "none", ticks: 5, tickSize: 0 },
      y: { domain: reach, label: "measured change, points", labelArrow: "none", ticks: 5, tickSize: 0 },
      color: byLabel(),
      marks: [
        Plot.line(
          [
            [reach[0], reach[0]],
            [reach[1], reach[1]],
          ],
          { stroke: "var(--soft)", strokeDasharray: "4 4", strokeOpacity: 0.7 },
        ),
        Plot.dot(data, {
          x: "predicted",
          y: "measured",
          fill: (d) => d.e.label,
          fillOpacity: (d) => (d.trusted ? 0.9 : 0.3),
          stroke: (d) => d.e.label,
          r: 4.5,
        }),
        tip(data, {
          x: "predicted",
          y: "measured",
          title: (d) =>
            `${clipped(d.e.label, 40)}\n${taskName(d.source)} while ${taskName(d.target)} was learned\nforecast ${two(d.predicted)}, measured ${two(d.measured)}\ntrust ${two(d.trust)}`,
        }),
      ],
    }),
  );
}

function drawKernel(box, width) {
  const data = analysed().flatMap((e) =>
    (e.analysis.kernel[state.source] || []).map((v, i) => ({ e, t: state.source + i, v })),
  );
  if (!data.length) {
    box.append(el("p", { class: "soft" }, "No analysed run has learned this task."));
    return;
  }
  box.append(
    plot(width, `Change of the tangent kernel of ${taskName(state.source)} while later tasks were learned, by method`, {
      height: 270,
      x: {
        domain: d3.range(state.source + 1, group().learned + 1),
        type: "point",
        label: "after task",
        labelArrow: "none",
        tickSize: 0,
        ticks: ticks(group().learned, 10).filter((t) => t > state.source),
      },
      y: { label: "relative change of the kernel", labelArrow: "none", grid: true, zero: true, tickSize: 0, ticks: 5 },
      marks: [
        ...analysed().flatMap((e) => {
          const own = data.filter((d) => d.e === e);
          return [
            Plot.line(own, {
              x: (d) => d.t + 1,
              y: "v",
              stroke: colour(e),
              strokeWidth: 1.7,
              strokeDasharray: dash(e),
            }),
            Plot.dot(own, { x: (d) => d.t + 1, y: "v", fill: colour(e), r: 2.2 }),
          ];
        }),
        tip(data, {
          x: (d) => d.t + 1,
          y: "v",
          title: (d) => `${clipped(d.e.label, 40)}\nafter ${taskName(d.t)}: ${three(d.v)}`,
        }),
      ],
    }),
  );
}

const withImages = () => analysed().filter((e) => Object.keys(e.analysis.images.pictures).length);

function drawImages(box) {
  const entry = withImages().find((e) => e.label === state.pictured) || withImages()[0];
  if (!entry) return;
  const { pictures, endangered, forgotten } = entry.analysis.images;
  const rows = [
    ["Most endangered, by the forecast before the next task", endangered],
    ["Most forgotten, from when the task was learned to the end", forgotten],
  ];
  for (const [title, lists] of rows) {
    const list = lists[state.source] || [];
    box.append(el("p", { class: "soft" }, title));
    box.append(
      list.length
        ? el(
            "div",
            { class: "row" },
            list.map(({ id, label, guess }) =>
              el(
                "figure",
                { class: "sample" },
                el("img", { src: pictures[id], alt: `test image ${id} of class ${label}` }),
                `${label} → ${guess}`,
              ),
            ),
          )
        : el("p", {}, "none of this task"),
    );
  }
}
