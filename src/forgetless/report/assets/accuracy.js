// The accuracies: what was forgotten, and when.
function accuracyTable() {
  const rows = entries().flatMap((e) =>
    e.seeds.flatMap((seed, i) =>
      e.accuracy[i].flatMap((row, t) =>
        row.flatMap((value, s) =>
          value == null ? [] : [[e.label, seed, t + 1, group().tasks[t], s + 1, group().tasks[s], value]],
        ),
      ),
    ),
  );
  return { columns: ["method", "seed", "after_task", "after_task_name", "on_task", "on_task_name", "accuracy"], rows };
}

function lowest() {
  const least = d3.min(entries().flatMap((e) => e.mean.flat().filter((v) => v != null)));
  return least == null ? 0 : Math.max(0, Math.floor((least - 2) / 10) * 10);
}

function drawCurves(box) {
  const { learned, tasks } = group();
  const grid = el("div", { class: "small" });
  box.append(grid);
  const low = lowest();
  // All cells first: how wide one is depends on how many there are.
  grid.append(...d3.range(learned).map((s) => el("div", { class: "curve", "data-task": s + 1 })));
  const width = grid.firstChild.clientWidth;
  for (const [s, cell] of Array.from(grid.children).entries()) {
    const data = entries().flatMap((e) => measured(e).filter((d) => d.s === s && d.t >= s));
    cell.append(
      plot(width, `${Measure()} on ${taskName(s)} after each task, by method`, {
        height: 122,
        marginLeft: 26,
        marginTop: 20,
        marginBottom: 22,
        marginRight: 6,
        x: {
          domain: [1, Math.max(2, learned)],
          label: null,
          ticks: learned < 5 ? d3.range(1, learned + 1) : 4,
          tickFormat: "d",
          tickSize: 3,
        },
        y: { domain: [low, 100], label: null, ticks: [low, (low + 100) / 2, 100], tickSize: 0, grid: true },
        marks: [
          Plot.text(
            [
              clipped(
                `${s + 1} · ${tasks[s] === `task ${s + 1}` ? "" : tasks[s]}`.replace(/ · $/, ""),
                Math.floor(width / 7.6),
              ),
            ],
            { frameAnchor: "top-left", dy: -17, dx: -24, fontWeight: 600, fontSize: 11.5 },
          ),
          ...entries().flatMap((e) => {
            const own = data.filter((d) => d.entry === e);
            const place = { x: (d) => d.t + 1, y: "v" };
            return [
              e.seeds.length > 1
                ? Plot.areaY(own, {
                    x: (d) => d.t + 1,
                    y1: (d) => Math.max(low, d.v - d.sd),
                    y2: (d) => Math.min(100, d.v + d.sd),
                    fill: colour(e),
                    fillOpacity: 0.14,
                    ariaHidden: true,
                  })
                : null,
              own.length > 1
                ? Plot.line(own, { ...place, stroke: colour(e), strokeWidth: 1.6, strokeDasharray: dash(e) })
                : Plot.dot(own, { ...place, fill: colour(e), r: 2.5 }),
            ];
          }),
          tip(data, { x: (d) => d.t + 1, y: "v", title: (d) => cellTitle(d.entry, d.t, d.s) }),
        ],
      }),
    );
  }
}

const viridis = (low, label) => ({ type: "linear", scheme: "viridis", domain: [low, 100], label, clamp: true });

function drawMaps(box) {
  const low = lowest();
  const { learned } = group();
  box.append(
    el(
      "div",
      { class: "legend" },
      Plot.legend({ color: viridis(low, `${measure()}, %`), width: 200, marginLeft: 10, style: { background: "none" } }),
    ),
  );
  const grid = el("div", { class: "maps" });
  box.append(grid);
  for (const entry of entries()) {
    const cell = el("div", { class: "map", "data-label": entry.label });
    grid.append(cell);
    const width = Math.min(cell.clientWidth, 360);
    const data = measured(entry).filter((d) => d.t < learned && d.s < learned);
    const side = {
      domain: d3.range(1, learned + 1),
      ticks: ticks(learned, 8),
      tickSize: 0,
      padding: learned > 20 ? 0 : 0.04,
    };
    cell.append(
      plot(width, `${Measure()} of ${entry.label} after each task (rows) on each task (columns)`, {
        height: width - 4,
        marginTop: 24,
        marginBottom: 34,
        marginLeft: learned > 9 ? 42 : 36,
        marginRight: 6,
        x: { ...side, label: "on task", labelAnchor: "center", labelArrow: "none" },
        y: { ...side, label: "after task", labelAnchor: "center", labelArrow: "none" },
        color: viridis(low),
        marks: [
          Plot.text([clipped(entry.label, 32)], { frameAnchor: "top-left", dy: -18, fontWeight: 600, fontSize: 12 }),
          Plot.cell(data, { x: (d) => d.s + 1, y: (d) => d.t + 1, fill: "v" }),
          (width - 42) / learned >= 20
            ? Plot.text(data, {
                x: (d) => d.s + 1,
                y: (d) => d.t + 1,
                text: (d) => d3.format(".0f")(d.v),
                fill: (d) => inkOn(d3.interpolateViridis((d.v - low) / (100 - low))),
                fontSize: 11,
              })
            : null,
          tip(data, { x: (d) => d.s + 1, y: (d) => d.t + 1, maxRadius: 40, title: (d) => cellTitle(entry, d.t, d.s) }),
        ],
      }),
    );
  }
}

const finals = (entry) => (entry.learned ? measured(entry).filter((d) => d.t === entry.learned - 1 && d.s <= d.t) : []);

function drawFinals(box, width) {
  const { learned } = group();
  const data = entries().flatMap(finals);
  box.append(
    plot(width, `${Measure()} on each task at the end, by method`, {
      height: 280,
      x: {
        domain: d3.range(1, learned + 1),
        type: "point",
        label: "task",
        labelArrow: "none",
        ticks: ticks(learned, width / 26),
        tickSize: 0,
        padding: 0.4,
      },
      y: {
        domain: [lowest(), 100],
        label: `${measure()} at the end, %`,
        labelArrow: "none",
        grid: true,
        ticks: 5,
        tickSize: 0,
      },
      marks: [
        ...entries().flatMap((e) => {
          const own = finals(e);
          const place = { x: (d) => d.s + 1, y: "v" };
          return [
            e.seeds.length > 1
              ? Plot.ruleX(own, {
                  x: place.x,
                  y1: (d) => d.v - d.sd,
                  y2: (d) => Math.min(100, d.v + d.sd),
                  stroke: colour(e),
                  strokeOpacity: 0.5,
                  strokeWidth: 1.5,
                })
              : null,
            Plot.line(own, { ...place, stroke: colour(e), strokeWidth: 1.5, strokeDasharray: dash(e) }),
            Plot.dot(own, {
              ...place,
              // Plot's second kinds of a shape are hollow, and some shapes have lines alone.
              fill: e.symbol.endsWith("2") ? "var(--card)" : colour(e),
              stroke: colour(e),
              r: 3,
              symbol: e.symbol,
            }),
          ];
        }),
        tip(data, { x: (d) => d.s + 1, y: "v", title: (d) => cellTitle(d.entry, d.t, d.s) }),
      ],
    }),
  );
}

function drawAccuracy(section) {
  section.append(el("h2", { id: "accuracy-title" }, "What was forgotten, and when"));
  const place = el("div", { class: "panels" });
  section.append(place);
  const none = group().learned ? null : "No task was learned to its end, so there is no accuracy to show.";
  panel(place, {
    id: "curves",
    wide: true,
    title: `${Measure()} on each task over the run`,
    text: "One panel a task, from the moment it was learned: across, the tasks learned since; the shade is the standard deviation over the seeds.",
    draw: drawCurves,
    table: accuracyTable,
    missing: none,
  });
  panel(place, {
    id: "matrices",
    wide: true,
    title: `The ${measure()} matrix of each method`,
    text: "Rows after learning a task, columns on a task. A column that darkens downwards is a task being forgotten.",
    draw: drawMaps,
    table: accuracyTable,
    missing: none,
  });
  panel(place, {
    id: "finals",
    wide: true,
    title: "What is left of each task at the end",
    text: `${Measure()} on every task after the last one; bars are the standard deviation over the seeds.`,
    draw: drawFinals,
    missing: none,
    table: () => ({
      columns: ["method", "on_task", "on_task_name", "accuracy_mean", "accuracy_std"],
      rows: entries().flatMap((e) => finals(e).map((d) => [e.label, d.s + 1, group().tasks[d.s], d.v, d.sd])),
    }),
  });
}
