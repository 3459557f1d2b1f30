"""Scripts that tell what can be seen on a page."""

# Of every text that can be seen, its contrast with what is behind it (WCAG 2.2).
CONTRAST = """
const curve = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
const shares = [0.2126, 0.7152, 0.0722];
const light = (rgb) => rgb.reduce((sum, v, i) => sum + shares[i] * curve(v / 255), 0);
const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
const behind = (node) => {
  for (let at = node; at; at = at.parentElement) {
    const c = parse(getComputedStyle(at).backgroundColor);
    if (c.length === 3 || c[3] > 0) return c.slice(0, 3);
  }
  return [255, 255, 255];
};
// The number in a cell of a map stands on the colour of the cell.
const cellBehind = (node) => {
  const box = node.getBoundingClientRect();
  const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
  const cells = node.closest("svg").querySelectorAll("g[aria-label=cell] rect");
  return Array.from(cells).find((cell) => {
    const b = cell.getBoundingClientRect();
    return b.left <= x && x <= b.right && b.top <= y && y <= b.bottom;
  });
};
const hidden = ".unseen, .skip, script, style, noscript";
const found = [];
for (const node of document.querySelectorAll("body *")) {
  const texts = Array.from(node.childNodes).filter((n) => n.nodeType === 3);
  const own = texts.some((n) => n.textContent.trim());
  if (!own || !node.getClientRects().length || node.closest(hidden)) continue;
  const style = getComputedStyle(node);
  const drawn = node instanceof SVGElement;
  const cell = drawn && cellBehind(node);
  const paper = cell ? parse(getComputedStyle(cell).fill).slice(0, 3) : behind(node);
  const ink = parse(drawn ? style.fill : style.color).slice(0, 3);
  const [a, b] = [light(ink), light(paper)].sort((p, q) => q - p);
  found.push([(a + 0.05) / (b + 0.05), node.textContent.slice(0, 40), node.tagName]);
}
return found;
"""

# Everything that reaches beyond the window, unless a box around it scrolls by itself.
BEYOND = """
return Array.from(document.querySelectorAll("body *"))
  .filter((n) => !n.closest(".scroll, .unseen, .skip") && n.getClientRects().length)
  .filter((n) => n.getBoundingClientRect().right > innerWidth + 1)
  .map((n) => n.outerHTML.slice(0, 120));
"""

# How many charts use the colour of the first method, for a line or a point.
USING_FIRST_COLOUR = """
return Array.from(document.querySelectorAll(".drawing svg"))
  .filter((svg) => svg.outerHTML.includes("--c0")).length;
"""

# Controls and pictures that a screen reader could not name.
UNNAMED = """
const all = "button, select, img, .drawing > svg, .curve svg, .map svg";
const written = (n) => n.getAttribute("aria-label") || n.alt || n.textContent.trim();
const name = (n) => written(n) || n.labels?.length;
return Array.from(document.querySelectorAll(all)).filter((n) => !name(n)).length;
"""

COLUMN = """
const rows = document.querySelectorAll("#results tbody tr");
return Array.from(rows, (row) => row.cells[arguments[0]].textContent);
"""
HEADINGS = "return Array.from(document.querySelectorAll('h1,h2,h3'), (h) => h.tagName).join('')"
CELLS = "return Array.from(document.querySelectorAll(arguments[0]), (cell) => cell.textContent)"
PAUSE = "return new Promise((go) => setTimeout(go, 150))"
