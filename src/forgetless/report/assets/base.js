"use strict";
// Shared by all parts: the numbers, the choices, elements from text, formats of numbers.
const DATA = JSON.parse(document.getElementById("data").textContent);
const state = {
  group: 0, // which scenario
  hidden: new Set(), // labels that are switched off
  source: 0,
  target: 1, // the pair of tasks in the analysis
  statistic: 0, // of an overlap: 0 the largest singular value, 1 the mean
  pictured: null, // label whose images are shown
  share: 1, // which share of variance is to be kept
  sort: { column: 1, descending: true },
};
const group = () => DATA.groups[state.group];
const entries = () => group().entries.filter((e) => !state.hidden.has(e.label));
const colour = (entry) => `var(--c${entry.colour})`;
const dash = (entry) => entry.dash;
// A piece of an entry's line, beside its name.
const swatch = (entry) =>
  d3
    .create("svg")
    .attr("class", "swatch")
    .attr("viewBox", "0 0 26 6")
    .attr("aria-hidden", "true")
    .call((svg) =>
      svg
        .append("line")
        .attr("x1", 0)
        .attr("x2", 26)
        .attr("y1", 3)
        .attr("y2", 3)
        .attr("stroke", colour(entry))
        .attr("stroke-width", 3)
        .attr("stroke-dasharray", dash(entry) || null),
    )
    .node();

// The accuracies of this scenario, of the test set or of a validation set.
const measure = () => group().measure;
const Measure = () => measure()[0].toUpperCase() + measure().slice(1);

// An element; text only ever becomes text. Attributes that start with "on" are listeners.
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child != null && child !== false));
  return node;
}
// A table; show makes what a cell contains from its value and the number of its column.
const tableElement = (columns, rows, show) =>
  el(
    "table",
    {},
    el("thead", {}, el("tr", {}, ...columns.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((value, i) => el("td", {}, show(value, i)))))),
  );
// A name that somebody chose, whatever its direction and length.
const named = (text) => el("bdi", { class: "name", dir: "auto", title: text.length > 40 ? text : null }, text);
const clipped = (text, most = 22) => {
  const letters = Array.from(text.replace(/\s+/g, " "));
  return letters.length > most ? letters.slice(0, most - 1).join("") + "…" : letters.join("");
};
const taskName = (t) => {
  const name = group().tasks[t];
  return name === `task ${t + 1}` ? name : `task ${t + 1}, ${clipped(name)}`;
};

const fixed = (digits) => (value) => (value == null ? "–" : d3.format(`.${digits}f`)(value));
const one = fixed(1);
const two = fixed(2);
const three = fixed(3);
// Mean ± standard deviation; of a single seed there is no spread.
const spread = (pair, seeds = 2) =>
  pair == null ? "–" : seeds > 1 ? `${two(pair[0])} ± ${two(pair[1])}` : two(pair[0]);
function bytes(count) {
  if (count == null) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (count >= 999.5 && power < units.length - 1) {
    count /= 1000;
    power += 1;
  }
  return `${power && count < 99.5 ? d3.format(".2~r")(count) : d3.format(".0f")(count)} ${units[power]}`;
}
function seconds(value) {
  if (value == null) return "–";
  if (value < 60) return `${one(value)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const say = (text) => {
  document.getElementById("said").textContent = text;
};

// Numbers of the single seeds, for the tip; of many seeds, the range.
function ofSeeds(entry, t, s) {
  const values = entry.seeds.map((seed, i) => [seed, entry.accuracy[i][t][s]]).filter(([, v]) => v != null);
  if (values.length < 2) return "";
  if (values.length <= 5) return values.map(([seed, v]) => `\nseed ${seed}: ${two(v)}`).join("");
  const ends = d3.extent(values, ([, v]) => v);
  return `\n${values.length} seeds from ${two(ends[0])} to ${two(ends[1])}`;
}
const cellTitle = (entry, t, s) => {
  const value = entry.seeds.length > 1 ? spread([entry.mean[t][s], entry.std[t][s]]) : two(entry.mean[t][s]);
  return `${clipped(entry.label, 40)}\n${value} % on ${taskName(s)}\nafter ${taskName(t)}${ofSeeds(entry, t, s)}`;
};
// Every measured accuracy of an entry, after task t on task s.
const measured = (entry) =>
  entry.mean
    .flatMap((row, t) => row.map((v, s) => ({ entry, t, s, v, sd: entry.std[t][s] })))
    .filter((d) => d.v != null);
