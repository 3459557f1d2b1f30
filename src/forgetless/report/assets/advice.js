// Advice: memory, components, and a command.
function drawMemory(box, width) {
  const data = entries().filter((e) => e.memory_bytes != null && e.average);
  const most = d3.max(data, (e) => e.memory_bytes);
  const low = d3.min(data, (e) => e.average[0] - e.average[1]);
  const high = d3.max(data, (e) => e.average[0] + e.average[1]);
  const room = Math.max(1, (high - low) * 0.15);
  const powers = d3.range(width < 420 ? 5 : 3, Math.ceil(Math.log10(Math.max(most, 1e4))) + 1).map((n) => 10 ** n);
  const edge = 1.7 * Math.max(most, 1000);
  const shown = powers
    .filter((p) => p < edge)
    .filter((_, i) => i % Math.ceil(powers.length / Math.max(2, width / 80)) === 0);
  box.append(
    plot(width, "Average accuracy against the memory that a method keeps", {
      height: 300,
      marginRight: 24,
      inset: 12,
      x: {
        type: "symlog",
        constant: 500,
        domain: [0, edge],
        label: "memory for a seed",
        labelArrow: "none",
        ticks: [0, ...shown],
        tickFormat: bytes,
        tickSize: 0,
      },
      y: {
        domain: [low - room, Math.min(100, high + room)],
        label: `A_T (${measure()}), %`,
        labelArrow: "none",
        grid: true,
        ticks: 5,
        tickSize: 0,
      },
      color: byLabel(),
      marks: [
        Plot.ruleX(data, {
          x: "memory_bytes",
          y1: (e) => e.average[0] - e.average[1],
          y2: (e) => e.average[0] + e.average[1],
          stroke: "label",
          strokeOpacity: 0.6,
          strokeWidth: 1.5,
        }),
        Plot.dot(data, { x: "memory_bytes", y: (e) => e.average[0], fill: "label", r: 5 }),
        Plot.text(data, {
          x: "memory_bytes",
          y: (e) => e.average[0],
          text: (e) => clipped(e.label, 18),
          dy: -12,
          fontSize: 11.5,
          textAnchor: (e) => (e.memory_bytes > most / 4 ? "end" : e.memory_bytes === 0 ? "start" : "middle"),
          fontWeight: 550,
        }),
        tip(data, {
          x: "memory_bytes",
          y: (e) => e.average[0],
          title: (e) =>
            `${clipped(e.label, 40)}\nA_T ${spread(e.average, e.seeds.length)} %, F_T ${spread(e.forgetting, e.seeds.length)}\n${bytes(e.memory_bytes)} (${d3.format(",")(e.memory_bytes)} bytes)`,
        }),
      ],
    }),
  );
}

const share = (value) => `${Math.round(100 * value)} %`;
const needed = (curve, wanted) => {
  const index = curve.findIndex((v) => v >= wanted - 1e-12);
  return index < 0 ? null : index + 1;
};

function drawComponents(box) {
  const entry = advisor();
  const rows = entry.analysis.variance.map((item, t) => [
    taskName(t),
    ...DATA.shares.map((s) => needed(item.curve, s)),
  ]);
  box.append(
    el(
      "div",
      { class: "scroll" },
      tableElement(["task", ...DATA.shares.map(share)], rows, (cell, i) => (i ? String(cell ?? "–") : named(cell))),
    ),
  );
}
// The run whose features are counted: one that stores directions, if there is one.
const advisor = () => {
  const able = group().entries.filter((e) => e.analysis && e.analysis.variance.length);
  return able.find((e) => e.analysis.variance.some((v) => v.kept)) || able[0];
};

function copyable(text) {
  const button = el(
    "button",
    {
      type: "button",
      class: "copy",
      onclick: async () => {
        try {
          await navigator.clipboard.writeText(text);
        } catch {
          // a page from disk may not be allowed to; then the old way
          const field = el("textarea", { class: "unseen" });
          field.value = text;
          document.body.append(field);
          field.select();
          document.execCommand("copy");
          field.remove();
          button.focus();
        }
        button.textContent = "Copied";
        say("Command copied");
      },
    },
    "Copy",
  );
  return el("div", { class: "command" }, el("pre", { tabindex: "0" }, text), button);
}

function drawAdvice(section) {
  section.append(el("h2", { id: "advice-title" }, "What to do about it"));
  const place = el("div", { class: "panels" });
  section.append(place);
  const known = group().entries.filter((e) => e.memory_bytes != null && e.average);
  panel(place, {
    id: "memory",
    title: `${Measure()} against memory`,
    text: "The memory of each method for a seed at the end, and the accuracy it buys. Up and to the left is better.",
    draw: drawMemory,
    missing: known.length
      ? null
      : "The traces do not have the methods' memory; runs with --keep all do.",
    table: () => ({
      columns: ["method", "memory_bytes", "A_T_mean", "A_T_std", "F_T_mean", "F_T_std"],
      rows: entries()
        .filter((e) => e.average)
        .map((e) => [e.label, e.memory_bytes, ...e.average, ...e.forgetting]),
    }),
  });
  const entry = advisor();
  const most = entry ? d3.max(entry.analysis.variance, (v) => v.samples) : 0;
  panel(place, {
    id: "components",
    drawn: false,
    title: "Directions that keep most of the variance",
    text: entry
      ? `Directions that hold a share of the variance of a task's features, from ${most} samples of it in the ${entry.label} run.`
      : "",
    draw: drawComponents,
    missing: entry ? null : "They need an analysis of the runs' weights.",
    table: () => ({
      columns: ["task", ...DATA.shares.map((s) => `directions_for_${Math.round(100 * s)}_percent`)],
      rows: entry.analysis.variance.map((item, t) => [t + 1, ...DATA.shares.map((s) => needed(item.curve, s))]),
    }),
  });
  const first = group().entries.find((e) => e.protect[state.share]);
  if (first) {
    section.append(
      el(
        "p",
        {},
        "This command learns the same tasks with PCA-OGD and stores the directions that hold the chosen share of each task's variance:",
      ),
      el(
        "div",
        { class: "choices" },
        chooser("share", state.share, DATA.shares.map(share), (n) => {
          state.share = n;
        }),
      ),
      copyable(first.protect[state.share]),
      el("p", {}, "The same with KronOGD, in memory that does not grow with the tasks:"),
      copyable(first.hold[state.share]),
    );
  } else {
    section.append(
      el(
        "p",
        {},
        "These runs were made by a script, so there is no command to repeat them; PCAOGD(variance=0.95) keeps 95 % of a task's variance.",
      ),
    );
  }
}
