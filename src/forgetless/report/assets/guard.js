// The page of a guard: one group, whose entries are the tasks.
const guard = group();
const taskEntry = (number) => guard.entries[number - 1];
const percent = (value) => (value == null ? "–" : `${d3.format(Math.abs(value) < 0.1 ? ".1%" : ".0%")(value)}`);
const short = (value) => (value == null ? "–" : d3.format(".3~g")(value));
const whole = d3.format(",d");

function drawTop(header) {
  header.append(
    el("h1", {}, `Guard report · ${guard.method} · `, named(guard.model), ` · ${plural(guard.steps, "step")}`),
    el("p", { class: "headline" }, guard.headline),
  );
}

function drawAdvice(section) {
  section.append(
    el("h2", { id: "advice-title" }, "What to do"),
    el("ul", {}, guard.advice.map((text) => el("li", {}, text))),
    el("h3", {}, "Warnings"),
    guard.warnings.length
      ? el(
          "ul",
          {},
          guard.warnings.map(({ step, text }) => el("li", {}, el("span", { class: "soft" }, `step ${whole(step)}: `), text)),
        )
      : el("p", { class: "soft" }, "None was raised."),
  );
}

// A table whose rows become cards on a narrow screen.
function cards(columns, rows) {
  const shown = columns.filter((c) => rows.some((row) => c.value == null || c.value(row) != null));
  return el(
    "div",
    { class: "scroll" },
    el(
      "table",
      { class: "cards" },
      el("thead", {}, el("tr", {}, shown.map((c) => el("th", { scope: "col", title: c.hint }, c.name)))),
      el(
        "tbody",
        {},
        rows.map((row) =>
          el("tr", {}, shown.map((c, i) => el("td", { "data-name": i ? c.name : null }, el("span", {}, c.show(row))))),
        ),
      ),
    ),
  );
}

function drawTasks(section) {
  section.append(el("h2", { id: "tasks-title" }, "The tasks"));
  if (!guard.tasks.length) {
    section.append(el("p", { class: "soft" }, "None is stored yet."));
    return;
  }
  const earlier = (t) => t.before[t.before.length - 1];
  section.append(
    el(
      "p",
      { class: "soft" },
      "Drift is how far the outputs on the kept samples have moved since the task was stored, in parts of their variance: at 1, as far as those of different samples lie apart.",
    ),
    cards(
      [
        { name: "task", show: (t) => [swatch(taskEntry(t.number)), `task ${t.number}`] },
        { name: "stored at step", value: (t) => t.step, show: (t) => (t.step == null ? "–" : whole(t.step)) },
        { name: "bytes", value: (t) => t.bytes, show: (t) => bytes(t.bytes) },
        { name: "directions", value: (t) => t.directions || null, show: (t) => whole(t.directions) },
        { name: "of its variance", hint: "explained by the directions when it ended", value: (t) => t.share, show: (t) => percent(t.share) },
        {
          name: "drift",
          value: (t) => t.drift,
          show: (t) => (t.drift == null ? "–" : t.drift.drift == null ? "not finite" : short(t.drift.drift)),
        },
        {
          name: "state",
          hint: "judged by drift, predictions and loss together",
          value: (t) => t.drift,
          show: (t) => (t.is_forgotten ? el("span", { class: "forgotten" }, "being forgotten") : t.drift == null ? "–" : "kept"),
        },
        { name: "predictions changed", value: (t) => t.drift && t.drift.changed, show: (t) => percent(t.drift && t.drift.changed) },
        {
          name: "loss, kept samples",
          hint: "when the task was stored, and now",
          value: (t) => t.drift && t.drift.loss,
          show: (t) => (t.drift == null || t.drift.loss == null ? "–" : `${short(t.drift.loss_then)} → ${short(t.drift.loss)}`),
        },
        {
          name: "accuracy, held out",
          value: (t) => t.held_out && t.held_out.accuracy,
          show: (t) =>
            t.held_out == null || t.held_out.accuracy == null
              ? "–"
              : `${earlier(t) && earlier(t)[1] != null ? `${percent(earlier(t)[1])} → ` : ""}${percent(t.held_out.accuracy)} of ${whole(t.held_out.samples)}`,
        },
        {
          name: "loss, held out",
          value: (t) => t.held_out && t.held_out.loss,
          show: (t) =>
            t.held_out == null || t.held_out.loss == null
              ? "–"
              : `${earlier(t) && earlier(t)[2] != null ? `${short(earlier(t)[2])} → ` : ""}${short(t.held_out.loss)}`,
        },
      ],
      guard.tasks,
    ),
  );
}

// Lines over the steps, with a rule where a task was stored. A line that starts when its task was
// stored goes on; other numbers are those of one task, and begin anew with the next.
function overSteps(box, width, { series, label, shares = false }) {
  const data = series.flatMap(({ name, look, read, start }) =>
    [
      ...(start ? [{ x: start[0], v: start[1], task: null, name, look }] : []),
      ...guard.moments.map((m) => ({ x: m.step, v: read(m.numbers), task: start ? null : m.task, name, look })),
    ].filter((d) => d.v != null),
  );
  const last = d3.max(data, (d) => d.x);
  const format = shares ? percent : short;
  box.append(
    plot(width, label, {
      height: 260,
      marginTop: 46,
      marginLeft: 48,
      x: { label: "steps", labelAnchor: "center", labelArrow: "none", tickSize: 3, ticks: width < 480 ? 4 : 8 },
      y: { label, labelArrow: "none", grid: true, tickSize: 0, ticks: 5, nice: true, zero: true, tickFormat: shares ? "%" : undefined },
      marks: [
        Plot.ruleX(guard.stored, { x: (d) => d[1], stroke: "var(--line)", strokeWidth: 1.5 }),
        ...[false, true].map((late) =>
          Plot.text(
            guard.stored.filter((d) => d[1] > 0.7 * last === late),
            { x: (d) => d[1], frameAnchor: "top", dy: -8, dx: late ? -3 : 3, text: (d) => `task ${d[0]}${width < 480 ? "" : " stored"}`, fill: "var(--soft)", fontSize: 10.5, textAnchor: late ? "end" : "start" },
          ),
        ),
        ...d3.groups(data, (d) => d.name).flatMap(([, own]) => [
          Plot.line(own, { x: "x", y: "v", z: "task", stroke: colour(own[0].look), strokeWidth: 1.7, strokeDasharray: dash(own[0].look) || null }),
          Plot.dot(own, { x: "x", y: "v", fill: colour(own[0].look), r: own.length > 40 ? 1.5 : 2.4 }),
        ]),
        tip(data, { x: "x", y: "v", title: (d) => `${d.name}\n${format(d.v)} after ${plural(d.x, "step")}` }),
      ],
    }),
  );
  if (series.length > 1)
    box.prepend(el("p", { class: "keys" }, series.map((s) => el("span", {}, swatch(s.look), s.name))));
}

const hasNumber = (name) => guard.moments.some((m) => m.numbers[name] != null);
const tableOf = (names) => () => ({
  columns: ["step", "task", ...names],
  rows: guard.moments.filter((m) => names.some((n) => m.numbers[n] != null)).map((m) => [m.step, m.task, ...names.map((n) => m.numbers[n])]),
});

function drawNumbers(section) {
  section.append(el("h2", { id: "numbers-title" }, "What was measured"));
  const place = el("div", { class: "panels" });
  section.append(place);
  const none = "Nothing was measured yet: these begin with the steps after the first task is stored.";
  const looks = [
    { colour: 3, dash: "" },
    { colour: 6, dash: "6 3" },
  ];
  const shares = ["removed", "blocked"].filter(hasNumber);
  if (guard.projects)
    panel(place, {
      id: "removed",
      title: "What was removed of the steps",
      text: "Means since the task before was stored. Removed: share of the steps' squared length; blocked: share of what they would have learned, to first order. What is not removed is left for the new task.",
      missing: shares.length ? null : none,
      draw: (box, width) =>
        overSteps(box, width, {
          label: "share of the steps",
          shares: true,
          series: shares.map((name, i) => ({ name, look: looks[i], read: (n) => n[name] })),
        }),
      table: tableOf(shares),
    });
  for (const [name, title, text] of [
    ["pull", "How hard the springs pull", "What the penalty adds to the gradient, in lengths of the gradient: near 0 the guard does nothing, above 1 it is stronger than the loss."],
    ["strength", "The strength of the penalty", "It grows while an earlier task gets worse, and shrinks while all are kept."],
  ]) {
    if (hasNumber(name))
      panel(place, {
        id: name,
        title,
        text,
        draw: (box, width) =>
          overSteps(box, width, { label: name, series: [{ name, look: looks[0], read: (n) => n[name] }] }),
        table: tableOf([name]),
      });
  }
  for (const [kind, title, text] of [
    ["drift", "How far each task has drifted", "Measured after 100, 200, 400, … steps for each stored task, and when a task ends."],
    ["loss", "The loss on each task's kept samples", "At the same moments. Drift for the better moves the outputs and lowers the loss."],
  ]) {
    const names = guard.tasks.map((t) => `${kind}/task ${t.number}`);
    const known = names.filter(hasNumber);
    panel(place, {
      id: kind,
      title,
      text,
      missing: known.length ? null : none,
      draw: (box, width) =>
        overSteps(box, width, {
          label: kind,
          series: known.map((name) => {
            const entry = taskEntry(Number(name.split(" ").pop()));
            const task = guard.tasks[Number(name.split(" ").pop()) - 1];
            const first = kind === "drift" ? 0 : task.drift && task.drift.loss_then;
            const start = task.step != null && first != null ? [task.step, first] : null;
            return { name: entry.label, look: entry, read: (n) => n[name], start };
          }),
        }),
      table: tableOf(known),
    });
  }
}

function drawLayers(section) {
  const { memory, layers, free, parameters } = guard;
  const spared = d3.sum(free, (f) => f.count);
  const fact = (value, words) => el("div", {}, el("b", {}, value), el("span", {}, words));
  const kept = memory.directions;
  section.append(
    el("h2", { id: "layers-title" }, "What is protected, and what is free"),
    el(
      "div",
      { class: "facts" },
      fact(whole(parameters), `numbers in ${plural(layers.length, "protected parameter")}`),
      fact(whole(spared), spared ? `trained numbers in ${plural(free.length, "parameter")} that are free` : "trained numbers that are free: all are protected"),
      kept == null ? null : fact(percent(1 - kept / parameters), `of their directions are free: ${whole(kept)} of ${whole(parameters)} are stored`),
      guard.now.removed == null ? null : fact(percent(1 - guard.now.removed), "of the steps of the present task were left"),
      guard.now.blocked == null ? null : fact(percent(1 - guard.now.blocked), "of what they would learn was left"),
      fact(bytes(memory.bytes + memory.drift_check), `stored: ${clipped(memory.storage, 60)}${memory.drift_check ? ", and samples for the drift" : ""}`),
    ),
    memory.notes.map((note) => el("p", { class: "soft" }, note)),
    cards(
      [
        { name: "parameter", show: (l) => named(l.name) },
        { name: "shape", show: (l) => l.shape.join(" × ") || "1" },
        { name: "bytes", value: (l) => l.bytes, show: (l) => bytes(l.bytes) },
        {
          name: "removed of its steps",
          value: (l) => l.removed,
          show: (l) =>
            l.removed == null
              ? "–"
              : [percent(l.removed), el("span", { class: "track", "aria-hidden": "true" }, el("span", { class: "bar", style: `width: ${(l.removed * 4).toFixed(2)}rem` }))],
        },
      ],
      layers,
    ),
    free.length
      ? el("details", {}, el("summary", {}, `${plural(free.length, "trained parameter")} without protection`), tableElement(["parameter", "numbers"], free.map((f) => [f.name, f.count]), (v, i) => (i ? whole(v) : named(v))))
      : "",
  );
}

function drawFoot(footer) {
  footer.append(
    el("h2", { id: "foot-title" }, "How it was made"),
    el("p", {}, `${guard.method}${Object.keys(guard.settings).length ? ": " : ""}${Object.entries(guard.settings).map(([k, v]) => `${k} ${v}`).join(", ")}.`),
    el("p", {}, `Made with forgetless ${guard.version}. Charts: Observable Plot and D3.`),
  );
}

for (const [id, draw] of Object.entries({ top: drawTop, advice: drawAdvice, tasks: drawTasks, numbers: drawNumbers, layers: drawLayers, foot: drawFoot }))
  draw(document.getElementById(id));
drawAll();
document.documentElement.dataset.ready = "yes";
let waiting = 0;
window.addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => drawAll(true), 120);
});
window.addEventListener("beforeprint", () => drawAll(true));
window.addEventListener("afterprint", () => drawAll(true));
