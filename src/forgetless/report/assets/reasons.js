// Why it was forgotten: the figures of the analysis, or a sentence where they cannot be drawn.
function drawReasons(section) {
  const { tasks, learned } = group();
  const folders = group().folders.length
    ? group()
        .folders.map((f) => (/^[\w./-]+$/.test(f) ? f : `'${f.replaceAll("'", "'\\''")}'`))
        .join(" ")
    : "DIR";
  section.append(
    el("h2", { id: "reasons-title" }, "Why it was forgotten"),
    el(
      "p",
      { class: "soft" },
      "How much a task overwrites depends on how far its directions in weight space overlap with those of earlier tasks. A method helps as far as it removes that overlap.",
    ),
  );
  const known = group().entries.filter((e) => e.analysis);
  const place = el("div", { class: "panels" });
  const pair = learned > 1 && known.length > 0;
  if (pair) {
    const reach = d3.max(known, (e) => e.analysis.learned);
    const names = (from, to) => tasks.map((_, t) => (from <= t && t < to ? taskName(t) : null));
    section.append(
      el(
        "div",
        { class: "choices", role: "group", "aria-label": "Tasks that the figures are about" },
        chooser("earlier task", state.source, names(0, reach - 1), (t) => {
          state.source = t;
          state.target = Math.max(state.target, t + 1);
        }),
        chooser("later task", state.target, names(state.source + 1, reach), (t) => {
          state.target = t;
        }),
      ),
    );
  }
  section.append(place);
  const how = known.length ? `Seed ${known[0].analysis.seed}, ${known[0].analysis.samples} samples of each task.` : "";
  const lacking = known.length
    ? null
    : "They need an analysis of the runs' weights.";
  const few = learned > 1 ? null : "An overlap needs two learned tasks.";
  panel(place, {
    id: "spectrum",
    title: "Overlap of the two tasks",
    text: `Singular values of O = V₁ T V₂ᵀ: 1 is a direction that both tasks need and that is not protected, 0 one that they do not share. ${how}`,
    draw: drawSpectrum,
    missing: lacking || few,
    table: () => ({
      columns: ["method", "earlier_task", "later_task", "number", "singular_value"],
      rows: analysed().flatMap((e) =>
        Object.entries(e.analysis.overlap).flatMap(([key, values]) =>
          values.map((v, i) => [e.label, ...key.split("-").map((n) => Number(n) + 1), i + 1, v]),
        ),
      ),
    }),
  });
  panel(place, {
    id: "variance",
    title: "Explained variance of the earlier task",
    text: "The share of its tangent features in the first directions; a point marks the number of directions that the method stores.",
    draw: drawVariance,
    missing: lacking,
    table: () => ({
      columns: ["method", "task", "directions", "explained_variance"],
      rows: analysed().flatMap((e) =>
        e.analysis.variance.flatMap((item, t) => item.curve.map((v, i) => [e.label, t + 1, i + 1, v])),
      ),
    }),
  });
  const statistic = el(
    "div",
    { class: "choices" },
    chooser("shown", state.statistic, statisticNames, (n) => {
      state.statistic = n;
    }),
  );
  panel(place, {
    id: "overlaps",
    wide: true,
    title: "Overlap of every pair of tasks",
    text: "One cell per pair, with the method's memory when the later task starts: how far the two overlap, or the share of the variance of the earlier task's features that steps may still change.",
    draw: drawOverlapMaps,
    missing: lacking || few,
    choices: statistic,
    table: () => ({
      columns: ["method", "earlier_task", "later_task", "largest", "mean", "unprotected"],
      rows: analysed().flatMap((e) => overlaps(e).map((d) => [e.label, d.s + 1, d.k + 1, d.largest, d.mean, d.unprotected])),
    }),
  });
  const noForecast = known.some((e) => e.analysis.forecast.length)
    ? null
    : "None of these methods can be forecast: it covers plain SGD and methods that project.";
  panel(place, {
    id: "forecast",
    title: "Forecast against measured",
    text: "The effect of the next task on a task's accuracy, as forecast by the linearised network and as measured. On the dashed line both agree; pale points have low trust.",
    draw: drawForecast,
    missing: lacking || few || noForecast,
    table: () => ({
      columns: ["method", "source_task", "target_task", "forecast_change", "measured_change", "trust"],
      rows: forecasts().map((d) => [d.e.label, d.source + 1, d.target + 1, d.predicted, d.measured, d.trust]),
    }),
  });
  panel(place, {
    id: "kernel",
    title: "How far the kernel moved",
    text: "‖K′ − K‖ / ‖K‖ on the earlier task: 0 in the theory. The larger it is, the less the overlap explains.",
    draw: drawKernel,
    missing: lacking,
    table: () => ({
      columns: ["method", "task", "after_task", "relative_change"],
      rows: analysed().flatMap((e) =>
        e.analysis.kernel.flatMap((list, s) => list.map((v, i) => [e.label, s + 1, s + i + 1, v])),
      ),
    }),
  });
  const pictured = withImages();
  const whose =
    pictured.length > 1
      ? el(
          "div",
          { class: "choices" },
          chooser(
            "method",
            Math.max(
              0,
              pictured.findIndex((e) => e.label === state.pictured),
            ),
            pictured.map((e) => clipped(e.label, 40)),
            (n) => {
              state.pictured = withImages()[n].label;
            },
          ),
        )
      : null;
  panel(place, {
    id: "images",
    wide: true,
    drawn: false,
    title: "Images of the earlier task",
    text: "Test images that were classified right when the task was learned: their class, and the network's guess.",
    draw: drawImages,
    choices: whose,
    missing:
      lacking ||
      (known.some((e) => Object.keys(e.analysis.images.pictures).length)
        ? null
        : "There are no images to show: nothing was forgotten, or the tasks are not images."),
    table: () => ({
      columns: ["method", "task", "kind", "test_image", "class", "taken_for"],
      rows: withImages().flatMap((e) =>
        ["endangered", "forgotten"].flatMap((kind) =>
          Object.entries(e.analysis.images[kind]).flatMap(([t, list]) =>
            list.map((i) => [e.label, Number(t) + 1, kind, i.id, i.label, i.guess]),
          ),
        ),
      ),
    }),
  });
  if (lacking) {
    section.append(
      el("p", {}, "If the runs stored their weights and the data is on disk, this command computes them:"),
      copyable(`forgetless report --analyse ${folders}`),
    );
  }
}
