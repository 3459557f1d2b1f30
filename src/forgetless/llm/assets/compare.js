// The page of compared language models. The first entry is the base model.
const base = () => group().entries[0];
const tuned = () => group().entries.slice(1);
const shown = { model: 0, answers: 6 }; // which tuned model, and how many of its answers

const klText = (e) => (e === base() ? "0" : `${d3.format(".2r")(e.kl)}${e.error == null ? "" : ` ± ${d3.format(".1r")(e.error)}`}`);

function drawTop(header) {
  const { prompts, questions } = group();
  const pieces = [plural(tuned().length, "tuned model"), plural(prompts.length, "prompt")];
  if (questions.length) pieces.push(plural(questions.length, "question"));
  header.append(
    el("h1", {}, `What fine-tuning changed · ${pieces.join(" · ")}`),
    el("p", { class: "headline" }, group().headline),
  );
}

function drawSummary(section) {
  const columns = [
    { name: "model", show: (e) => [el("span", { class: "key", style: `--colour: ${colour(e)}`, "aria-hidden": "true" }), named(e.label)] },
    { name: "KL to the base, nats per token", show: klText },
    { name: "loss on general texts", value: (e) => e.text, show: (e) => three(e.text) },
    ...Object.keys(base().tasks).map((task, i, { length }) => ({
      name: length > 1 ? `loss on ${task}` : "loss on the new task",
      show: (e) => three(e.tasks[task]),
    })),
    {
      name: "questions right",
      value: (e) => e.share,
      show: (e) => `${d3.sum(e.right)} of ${e.right.length}`,
    },
    ...Object.keys(base().scores).map((name) => ({ name, show: (e) => three(e.scores[name]) })),
  ].filter((c) => !c.value || group().entries.every((e) => c.value(e) != null));
  section.append(
    el("h2", { id: "summary-title" }, "The result"),
    el(
      "p",
      { class: "soft" },
      "KL(base ‖ model) is the mean over the tokens of the base model's greedy answers to the prompts, ± its standard error over the prompts. Losses are in nats per token.",
    ),
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        {},
        el("thead", {}, el("tr", {}, columns.map((c) => el("th", { scope: "col" }, c.name)))),
        el(
          "tbody",
          {},
          group().entries.map((e) =>
            el("tr", {}, columns.map((c, i) => el("td", { "data-name": i ? c.name : null }, el("span", {}, c.show(e))))),
          ),
        ),
      ),
    ),
  );
}

function drawFigures(section) {
  section.append(el("h2", { id: "figures-title" }, "Learned and forgotten"));
  const place = el("div", { class: "panels" });
  section.append(place);
  const withTask = base().task != null && tuned().length > 1;
  const several = Object.keys(base().tasks).length > 1;
  const learned = several ? "loss on the new tasks, mean" : "loss on the new task";
  if (withTask) {
    panel(place, {
      id: "learning-forgetting",
      title: "Learning against forgetting",
      text: `To the right: more of the new ${several ? "tasks" : "task"} was learned. Further down: the answers moved less. The bars are ± one standard error.${linked()}`,
      draw: (box, width) =>
        drawPlane(box, width, {
          title: "Learning against forgetting",
          label: "KL to the base, nats per token (square-root scale)",
          type: "sqrt",
          value: (e) => e.kl,
          error: (e) => e.error || 0,
          tell: (e) => `KL ${klText(e)}`,
        }),
      table: () => ({
        columns: ["model", learned, "KL to the base", "standard error"],
        rows: group().entries.map((e) => [e.label, e.task, e.kl, e.error]),
      }),
    });
  }
  if (withTask && base().text != null) {
    panel(place, {
      id: "learning-texts",
      title: "Learning against the loss of general texts",
      text: `Further down: the general texts are modelled as well as before, or better.${linked()}`,
      draw: (box, width) =>
        drawPlane(box, width, {
          title: "Learning against the loss of general texts",
          label: "rise of the loss on general texts",
          type: "linear",
          value: (e) => e.text - base().text,
          error: () => 0,
          tell: (e) => `loss on general texts ${three(base().text)} → ${three(e.text)}`,
        }),
      table: () => ({
        columns: ["model", learned, "loss on general texts"],
        rows: group().entries.map((e) => [e.label, e.task, e.text]),
      }),
    });
  }
  panel(place, {
    id: "prompts",
    title: "How far each prompt's answer moved",
    text: "Each dot is a prompt: KL per token of the base model's answer to it. The line is the mean over all tokens.",
    draw: drawPrompts,
    wide: !withTask || base().text != null,
    table: () => ({
      columns: ["prompt", ...tuned().map((e) => e.label)],
      rows: group().prompts.map((prompt, i) => [prompt, ...tuned().map((e) => e.each[i])]),
    }),
  });
}

// Models of one family, such as a method at several learning rates, in the order of what they learned.
const families = () => d3.groups(tuned(), (e) => e.family).map(([name, some]) => [name, d3.sort(some, (e) => -e.task)]);
const areFamilies = () => families().length < tuned().length;
const linked = () => (areFamilies() ? " A line joins the settings of one method." : "");

// Places of names, apart from each other: y in the units of the data.
function apart(named, scale) {
  let above = -Infinity;
  return d3.sort(named, (d) => scale(d.y)).map((d) => {
    above = Math.max(scale(d.y), above + 13);
    return { ...d, at: scale.invert(above) };
  });
}

function drawPlane(box, width, { title, label, type, value, error, tell }) {
  const fall = (e) => base().task - e.task;
  const points = group().entries.map((e) => ({ e, x: fall(e), y: value(e), sd: error(e) }));
  const middle = d3.mean(d3.extent(points, (d) => d.x));
  // Names are beside their points, towards the middle; a family has one, at its end.
  const ends = areFamilies() ? families().map(([name, some]) => ({ name, e: some.at(-1) })) : tuned().map((e) => ({ name: e.label, e }));
  const named = [{ name: base().label, e: base() }, ...ends].map((d) => ({ ...d, x: fall(d.e), y: value(d.e) }));
  const [height, marginTop, marginBottom] = [340, 30, 42];
  const [low, high] = d3.extent(points.flatMap((d) => [0, d.y, d.y + d.sd]));
  const scale = (type === "sqrt" ? d3.scaleSqrt() : d3.scaleLinear())
    .domain([low, high > low ? high : low + 1])
    .nice()
    .range([height - marginBottom, marginTop]);
  const names = (left) =>
    Plot.text(
      apart(named.filter((d) => d.x > middle === left), scale),
      {
        x: "x",
        y: "at",
        text: (d) => clipped(d.name, 24),
        dx: left ? -10 : 10,
        textAnchor: left ? "end" : "start",
        fill: "currentColor",
        stroke: "var(--card)",
        strokeWidth: 4,
        fontSize: 12,
      },
    );
  box.append(
    plot(width, title, {
      height,
      marginTop,
      marginLeft: 52,
      marginRight: 24,
      marginBottom,
      x: {
        label: Object.keys(base().tasks).length > 1 ? "the losses on the new tasks fell by, on average" : "the loss on the new task fell by",
        labelAnchor: "center",
        labelArrow: "none",
        nice: true,
        ticks: width < 480 ? 4 : 6,
      },
      y: { label, type, domain: scale.domain(), labelArrow: "none", grid: true, ticks: 6 },
      marks: [
        (areFamilies() ? families() : []).map(([, some]) =>
          Plot.line(some, { x: fall, y: value, stroke: colour(some[0]), strokeOpacity: 0.6, strokeWidth: 1.5 }),
        ),
        Plot.ruleX(
          points.filter((d) => d.sd),
          {
            x: "x",
            y1: (d) => Math.max(0, d.y - d.sd),
            y2: (d) => d.y + d.sd,
            stroke: (d) => colour(d.e),
            strokeWidth: 1.5,
          },
        ),
        Plot.dot(points, { x: "x", y: "y", r: 5, fill: (d) => colour(d.e) }),
        names(true),
        names(false),
        tip(points, {
          x: "x",
          y: "y",
          title: (d) => `${d.e.label}\n${tell(d.e)}\nloss on the new ${Object.keys(base().tasks).length > 1 ? "tasks, mean," : "task"} ${three(base().task)} → ${three(d.e.task)}`,
        }),
      ],
    }),
  );
}

function drawPrompts(box, width) {
  const dots = tuned().flatMap((e) => e.each.map((v, i) => ({ e, v, i })));
  const names = tuned().map((e) => e.label);
  box.append(
    plot(width, "KL of each prompt", {
      height: 60 + 74 * names.length,
      marginTop: 12,
      marginLeft: 12,
      marginRight: 20,
      marginBottom: 42,
      x: { type: "sqrt", label: "KL, nats per token (square-root scale)", labelAnchor: "center", labelArrow: "none", nice: true, zero: true, ticks: width < 480 ? 3 : 5 },
      y: { axis: null },
      fy: { domain: names, axis: null, padding: 0.1 },
      marks: [
        Plot.ruleY(names, { fy: (d) => d, y: 0, stroke: "var(--line)" }),
        Plot.dot(dots, Plot.dodgeY({ anchor: "middle", x: "v", fy: (d) => d.e.label, r: 3.2, fill: (d) => colour(d.e), fillOpacity: 0.75 })),
        Plot.tickX(tuned(), { x: "kl", fy: "label", stroke: colour, strokeWidth: 2.5, insetTop: 14 }),
        Plot.text(tuned(), { fy: "label", frameAnchor: "top-right", text: (e) => clipped(e.label, 30), fill: "currentColor", fontSize: 12, fontWeight: 600 }),
        tip(dots, {
          x: "v",
          fy: (d) => d.e.label,
          title: (d) => `${clipped(group().prompts[d.i], 50)}\n${d.e.label}: ${three(d.v)}`,
        }),
      ],
    }),
  );
}

// The pieces that a side shows: what is gone is the base model's, what is new the other's.
function words(pieces, side) {
  const mine = pieces.filter(([kind]) => kind === "same" || kind === side);
  if (!mine.length) return el("p", { class: "said soft" }, "(nothing)");
  return el(
    "p",
    { class: "said", dir: "auto" },
    mine.map(([kind, text]) => (kind === "same" ? text : el("mark", { class: kind }, text))),
  );
}
const sides = (pieces, entry) =>
  el(
    "div",
    { class: "sides" },
    el("div", {}, el("h4", {}, base().label), words(pieces, "gone")),
    el("div", {}, el("h4", {}, named(entry.label)), words(pieces, "new")),
  );

function modelChooser() {
  if (tuned().length < 2) return null;
  const select = el(
    "select",
    {
      "aria-label": "Tuned model",
      onchange: () => {
        shown.model = Number(select.value);
        redrawAnswers();
      },
    },
    tuned().map((e, i) => el("option", { value: i, selected: i === shown.model }, clipped(e.label, 40))),
  );
  return el("div", { class: "choices" }, el("label", {}, "Compare the base model with", select));
}

function drawAnswers(section) {
  const entry = tuned()[shown.model];
  const order = d3.sort(d3.range(group().prompts.length), (i) => -entry.each[i]);
  const same = order.filter((i) => entry.answers[i].every(([kind]) => kind === "same")).length;
  section.append(
    el("h2", { id: "answers-title" }, "The answers"),
    el(
      "p",
      { class: "soft" },
      `Those that moved most come first; ${same} of ${order.length} are the same word for word. Marked: words that are gone on the base model's side, new ones on the other.`,
    ),
    modelChooser() || "",
  );
  for (const i of order.slice(0, shown.answers)) {
    section.append(
      el(
        "article",
        { class: "pair" },
        el("p", { dir: "auto" }, group().prompts[i], el("span", { class: "tag number" }, `KL ${three(entry.each[i])}`)),
        sides(entry.answers[i], entry),
      ),
    );
  }
  if (order.length > shown.answers) {
    section.append(
      el(
        "button",
        {
          type: "button",
          class: "more",
          onclick: () => {
            shown.answers = order.length;
            redrawAnswers();
          },
        },
        `Show all ${order.length}`,
      ),
    );
  }
}

function drawQuestions(section) {
  const { questions } = group();
  section.hidden = !questions.length;
  if (!questions.length) return;
  const entry = tuned()[shown.model];
  const verdict = (right) => el("span", { class: right ? "verdict" : "verdict wrong" }, right ? "✓ right" : "✗ wrong");
  const lost = d3.range(questions.length).filter((i) => base().right[i] && !entry.right[i]).length;
  const won = d3.range(questions.length).filter((i) => !base().right[i] && entry.right[i]).length;
  const order = d3.sort(d3.range(questions.length), (i) => (base().right[i] === entry.right[i] ? 1 : 0));
  section.append(
    el("h2", { id: "questions-title" }, "The questions"),
    el(
      "p",
      { class: "soft" },
      `${entry.label} lost ${plural(lost, "right answer")} of the base model and gained ${won}. A reply is right if an accepted answer occurs in it.`,
    ),
    el(
      "div",
      { class: "scroll" },
      order.map((i) =>
        el(
          "article",
          { class: "pair" },
          el("p", { dir: "auto" }, questions[i][0], el("span", { class: "tag" }, questions[i][1].join(", "))),
          el(
            "div",
            { class: "sides" },
            el("div", {}, el("h4", {}, base().label, " ", verdict(base().right[i])), words(entry.replies[i], "gone")),
            el("div", {}, el("h4", {}, named(entry.label), " ", verdict(entry.right[i])), words(entry.replies[i], "new")),
          ),
        ),
      ),
    ),
  );
}

function redrawAnswers() {
  for (const [id, draw] of Object.entries({ answers: drawAnswers, questions: drawQuestions })) {
    const place = document.getElementById(id);
    place.replaceChildren();
    draw(place);
  }
}

drawTop(document.getElementById("top"));
drawSummary(document.getElementById("summary"));
drawFigures(document.getElementById("figures"));
redrawAnswers();
document.getElementById("foot").append(el("p", {}, "Made with forgetless. Charts: Observable Plot and D3."));
drawAll();
document.documentElement.dataset.ready = "yes";
let waiting = 0;
window.addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => drawAll(true), 120);
});
window.addEventListener("beforeprint", () => drawAll(true));
window.addEventListener("afterprint", () => drawAll(true));
