// A panel: a figure with its words, its drawing, and the numbers behind it.
const panels = []; // those on the page, to be drawn again when something changes

function panel(parent, { id, title, text, draw, table, wide = false, missing = null, choices = null, drawn = true }) {
  if (missing) {
    leaveOut(parent, id, title, missing);
    return;
  }
  const box = el("div", { class: "drawing", role: "group", "aria-label": title });
  const figure = el("figure", { class: `panel${wide ? " wide" : ""}`, id }, el("h3", {}, title));
  parent.append(figure);
  figure.append(el("p", {}, text), choices || "", box);
  const numbers = el("details", {}, el("summary", {}, "Numbers"));
  numbers.addEventListener("toggle", () => {
    if (numbers.open) numbers.append(listed(table()));
    else numbers.lastChild.remove();
  });
  figure.append(
    el(
      "div",
      { class: "tools" },
      !drawn
        ? null
        : el(
            "button",
            { type: "button", class: "svg", "aria-label": `Save “${title}” as SVG`, onclick: () => saveSvg(box, id) },
            "SVG",
          ),
      el(
        "button",
        {
          type: "button",
          class: "csv",
          "aria-label": `Save the numbers of “${title}” as CSV`,
          onclick: () => save(`${id}.csv`, "text/csv", csv(table())),
        },
        "CSV",
      ),
      numbers,
    ),
  );
  panels.push({ box, draw, width: 0, id, table });
}

// A panel that cannot be had is left out with a sentence; those with the same reason share it.
function leaveOut(parent, id, title, reason) {
  const section = parent.closest("section");
  const same = Array.from(section.querySelectorAll(".missing")).find((p) => p.dataset.reason === reason);
  const note = same || el("p", { class: "missing", "data-reason": reason, "data-panels": "", "data-titles": "" });
  note.dataset.panels += ` ${id}`;
  note.dataset.titles += `${same ? ", " : ""}${title.charAt(0).toLowerCase()}${title.slice(1)}`;
  note.replaceChildren(el("b", {}, "Left out: "), `${note.dataset.titles}. ${reason}`);
  if (!same) section.append(note);
}

// Draw what is on the page; with `resized` only what has another width than before.
function drawAll(resized = false) {
  for (const item of panels) {
    const width = item.box.clientWidth;
    if (!width || (resized && width === item.width)) continue;
    item.width = width;
    item.box.replaceChildren();
    if (entries().length) item.draw(item.box, width);
    else item.box.append(el("p", { class: "soft" }, "All methods are switched off."));
  }
}

// Plot with the looks of this page. The description is what a screen reader says.
function plot(width, description, options) {
  return Plot.plot({
    width,
    marginTop: 30,
    marginRight: 14,
    marginBottom: 34,
    marginLeft: 40,
    style: { fontSize: "11.5px", background: "none", overflow: "visible" },
    ariaLabel: description,
    ...options,
  });
}
// The tip follows the pointer: one for all lines, so that the nearest point speaks.
const tip = (data, options) =>
  Plot.tip(
    data,
    Plot.pointer({
      fontSize: 12,
      lineHeight: 1.35,
      textPadding: 9,
      pathFilter: "none",
      stroke: "var(--soft)",
      strokeOpacity: 0.5,
      maxRadius: 60,
      ...options,
    }),
  );
// Few enough ticks to be read: 1, 6, 11, …
const ticks = (count, most) => d3.range(1, count + 1, Math.max(1, Math.ceil(count / most)));

// Black or white, whichever is easier to read on a colour.
const inkOn = (background) => {
  const light = (part) => (part <= 10.3 ? part / 3294.6 : ((part / 255 + 0.055) / 1.055) ** 2.4);
  const { r, g, b } = d3.rgb(background);
  return 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b) > 0.179 ? "black" : "white";
};

const quoted = (value) => {
  const text = value == null ? "" : String(value);
  // A cell that begins like a formula is text all the same.
  const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
};
const csv = ({ columns, rows }) => [columns, ...rows].map((row) => row.map(quoted).join(",")).join("\r\n") + "\r\n";

function listed({ columns, rows }) {
  const most = 400;
  const shown = rows.slice(0, most);
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Numbers" },
    tableElement(columns, shown, (v) => (typeof v === "number" ? d3.format(".4~r")(v) : v == null ? "–" : named(String(v)))),
    rows.length > most ? el("p", {}, `${most} of ${rows.length} rows; the CSV file has all of them.`) : null,
  );
}

function save(name, type, content) {
  const url = URL.createObjectURL(new Blob([content], { type: `${type};charset=utf-8` }));
  const link = el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
  say(`${name} saved`);
}

// All drawings of a panel in one SVG file, with the colours that are on the screen now.
function svgText(box) {
  const space = box.getBoundingClientRect();
  const root = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const style = getComputedStyle(box);
  for (const drawn of box.querySelectorAll("svg")) {
    const place = drawn.getBoundingClientRect();
    const copy = drawn.cloneNode(true);
    const pairs = [
      [drawn, copy],
      ...Array.from(drawn.querySelectorAll("*"), (node, i) => [node, copy.querySelectorAll("*")[i]]),
    ];
    for (const [from, to] of pairs) {
      const computed = getComputedStyle(from);
      for (const name of ["fill", "stroke"]) {
        if (/var\(|currentcolor/i.test(from.getAttribute(name) || "")) to.setAttribute(name, computed[name]);
      }
    }
    copy.setAttribute("x", place.x - space.x);
    copy.setAttribute("y", place.y - space.y);
    copy.setAttribute("color", style.color);
    root.append(copy);
  }
  root.setAttribute("viewBox", `0 0 ${space.width} ${space.height}`);
  root.setAttribute("width", space.width);
  root.setAttribute("height", space.height);
  root.setAttribute("color", style.color);
  root.setAttribute("font-family", "system-ui, sans-serif");
  return new XMLSerializer().serializeToString(root);
}
const saveSvg = (box, id) => save(`${id}.svg`, "image/svg+xml", svgText(box));
