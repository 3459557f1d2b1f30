// Builds the page, and again after every choice.
function drawTop(header) {
  const { scenario, tasks, learned, entries: all } = group();
  const seeds = new Set(all.flatMap((e) => e.seeds)).size;
  const pieces = [
    learned < tasks.length ? `${learned} of ${tasks.length} tasks learned` : plural(tasks.length, "task"),
    plural(all.length, "method"),
    plural(seeds, "seed"),
  ];
  document.title = `${clipped(scenario, 60)}: forgetting report`;
  header.append(
    el("h1", {}, named(scenario), ` · ${pieces.join(" · ")}`),
    el("p", { class: "headline" }, group().headline),
  );
  for (const sentence of DATA.broken) {
    header.append(el("p", { class: "soft broken" }, el("b", {}, "Left out: "), sentence));
  }
  if (DATA.groups.length > 1) {
    header.append(
      el(
        "div",
        { class: "choices" },
        chooser(
          "scenario",
          state.group,
          DATA.groups.map((g) => clipped(g.scenario, 40)),
          (n) => {
            Object.assign(state, { group: n, source: 0, target: 1, pictured: null });
            state.hidden.clear();
          },
        ),
      ),
    );
  }
}

function drawMethods(nav) {
  for (const entry of group().entries) {
    const visible = !state.hidden.has(entry.label);
    const flip = () => {
      if (visible) state.hidden.add(entry.label);
      else state.hidden.delete(entry.label);
      say(`${entry.label} ${visible ? "hidden" : "shown"}`);
      redraw();
      Array.from(nav.children)
        .find((b) => b.dataset.label === entry.label)
        .focus();
    };
    nav.append(
      el(
        "button",
        {
          type: "button",
          "aria-pressed": String(visible),
          "data-label": entry.label,
          onclick: flip,
        },
        swatch(entry),
        named(entry.label),
      ),
    );
  }
}

function facts(pairs) {
  return el(
    "dl",
    {},
    pairs
      .filter(([, value]) => value != null && value !== "")
      .map(([name, value]) => [el("dt", {}, name), el("dd", {}, named(String(value)))])
      .flat(),
  );
}

function drawFoot(footer) {
  footer.append(el("h2", { id: "foot-title" }, "How it was made"));
  for (const e of group().entries) {
    footer.append(
      el(
        "details",
        {},
        el("summary", {}, named(e.label), `: settings, versions, command`),
        facts([
          ["seeds", e.seeds.join(", ")],
          ["status", e.status],
          ["command", e.command || "made by a script"],
          ...Object.entries(e.versions),
          ...Object.entries(e.config).filter(([key]) => key !== "seeds"),
        ]),
      ),
    );
  }
  if (DATA.command) footer.append(el("p", {}, "This page: ", el("code", {}, DATA.command)));
  const versions = new Set(
    group()
      .entries.map((e) => e.versions.forgetless)
      .filter(Boolean),
  );
  footer.append(
    el(
      "p",
      {},
      `Made with forgetless${versions.size ? ` ${[...versions].join(", ")}` : ""}. Charts: Observable Plot and D3.`,
    ),
  );
}

function redraw() {
  const parts = {
    top: drawTop,
    methods: drawMethods,
    summary: drawSummary,
    accuracy: drawAccuracy,
    reasons: drawReasons,
    advice: drawAdvice,
    foot: drawFoot,
  };
  const open = new Set(Array.from(document.querySelectorAll("footer details[open] bdi"), (node) => node.textContent));
  const scrolled = window.scrollY;
  document.body.style.minHeight = `${document.body.scrollHeight}px`; // so that nothing jumps
  panels.length = 0;
  for (const [id, draw] of Object.entries(parts)) {
    const place = document.getElementById(id);
    place.replaceChildren();
    draw(place);
  }
  drawAll();
  for (const node of document.querySelectorAll("footer details"))
    node.open = open.has(node.querySelector("bdi").textContent);
  document.body.style.minHeight = "";
  window.scrollTo({ top: scrolled, behavior: "instant" });
}

redraw();
document.documentElement.dataset.ready = "yes";
let waiting = 0;
window.addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => drawAll(true), 120);
});
window.addEventListener("beforeprint", () => drawAll(true));
window.addEventListener("afterprint", () => drawAll(true));
