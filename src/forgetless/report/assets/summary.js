// The result: a table of the methods that can be sorted.
function drawSummary(section) {
  const best = d3.max(
    group().entries.filter((e) => !e.everything),
    (e) => e.average && e.average[0],
  );
  const columns = [
    {
      name: "method",
      value: (e) => e.label,
      show: (e) => [
        named(e.label),
        e.status === "complete"
          ? null
          : el("span", { class: "tag" }, ` ${e.status} after ${plural(e.learned, "task")}`),
      ],
    },
    {
      name: "A_T, %",
      hint: `Mean ${measure()} on all tasks at the end`,
      value: (e) => e.average && e.average[0],
      show: (e) =>
        el(
          "span",
          { class: `number${e.average && e.average[0] === best ? " best" : ""}` },
          spread(e.average, e.seeds.length),
        ),
    },
    {
      name: "F_T, points",
      hint: "Mean drop from a task's best accuracy to the one at the end",
      value: (e) => e.forgetting && e.forgetting[0],
      show: (e) => el("span", { class: "number" }, spread(e.forgetting, e.seeds.length)),
    },
    {
      name: "memory",
      hint: "The method's memory for a seed at the end",
      value: (e) => (e.everything ? Infinity : e.memory_bytes),
      show: (e) => el("span", { class: "number" }, e.everything ? "all data" : bytes(e.memory_bytes)),
    },
    {
      name: "time",
      hint: "For all seeds together",
      value: (e) => e.seconds,
      show: (e) => el("span", { class: "number" }, seconds(e.seconds)),
    },
    {
      name: "seeds",
      value: (e) => e.seeds.length,
      show: (e) => el("span", { class: "number" }, String(e.seeds.length)),
    },
  ];
  const head = el(
    "tr",
    {},
    columns.map((column, index) => {
      const sorted = state.sort.column === index;
      const direction = state.sort.descending ? "descending" : "ascending";
      return el(
        "th",
        { scope: "col", "aria-sort": sorted ? direction : null },
        el(
          "button",
          {
            type: "button",
            title: column.hint,
            onclick: () => {
              state.sort = { column: index, descending: sorted ? !state.sort.descending : index > 0 };
              redraw();
              document.querySelectorAll("#results th button")[index].focus();
            },
          },
          column.name,
        ),
      );
    }),
  );
  const { value } = columns[state.sort.column];
  const order = state.sort.descending ? d3.descending : d3.ascending;
  const ranked = d3.sort(
    group().entries,
    (a, b) => (value(a) == null) - (value(b) == null) || order(value(a), value(b)),
  );
  section.append(
    el("h2", { id: "summary-title" }, "The result"),
    el(
      "p",
      { class: "soft" },
      `${group().setting} A_T is the mean ${measure()} on all tasks at the end; F_T is the mean drop of a task from its best accuracy. Mean ± standard deviation over the seeds.`.trim(),
    ),
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        { id: "results" },
        el("thead", {}, head),
        el(
          "tbody",
          {},
          ranked.map((e) =>
            el(
              "tr",
              { class: state.hidden.has(e.label) ? "off" : null },
              columns.map((c) => el("td", { "data-name": c.name.split(",")[0] }, c.show(e))),
            ),
          ),
        ),
      ),
    ),
  );
  if (group().entries.every((e) => e.memory_bytes == null && !e.everything)) {
    section.append(
      el(
        "p",
        { class: "soft" },
        "The traces do not have the methods' memory; runs with --keep all do.",
      ),
    );
  }
}
