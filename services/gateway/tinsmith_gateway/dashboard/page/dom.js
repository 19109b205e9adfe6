// Elements and tables. Text from anywhere is set as text: nothing here reads HTML.

export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

// What a cell shows: a text, {text, href, title, tone}, or {share, text} with a bar from 0 to 1.
function content(spec) {
  const told = spec !== null && typeof spec === "object" ? spec : { text: spec };
  const text = told.text === null || told.text === undefined || told.text === "" ? "–" : String(told.text);
  const title = told.title ?? undefined;
  if (told.href) return [el("a", { href: told.href, text, title })];
  if (told.share !== undefined) {
    const bar = el("meter", { min: 0, max: 1, value: told.share, "aria-label": text });
    return [bar, el("span", { text: ` ${text}` })];
  }
  return [el("span", { text, title, class: told.tone })];
}

// A section with one table whose rows are kept as long as their key is there, so that focus and
// selection survive each look. columns: [{head, cell, num}].
export class Table {
  constructor(title, columns, { key, empty = "none", note = "" }) {
    this.columns = columns;
    this.key = key;
    this.rows = new Map();
    this.body = el("tbody", { role: "rowgroup" });
    const heads = columns.map(({ head, num }) =>
      el("th", { scope: "col", role: "columnheader", text: head, class: num && "num" }));
    this.table = el("table", { role: "table" },
      el("caption", { text: title }),
      el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...heads)), this.body);
    this.empty = el("p", { class: "quiet", text: empty });
    this.node = el("section", { class: "panel" }, this.table, this.empty,
      note ? el("p", { class: "quiet", text: note }) : null);
  }

  update(items) {
    const there = new Set();
    let place = this.body.firstChild;
    for (const item of items) {
      const key = String(this.key(item));
      if (there.has(key)) continue;
      there.add(key);
      const row = this.rows.get(key) ?? this.#made(key);
      if (row.node !== place) this.body.insertBefore(row.node, place);
      place = row.node.nextSibling;
      this.columns.forEach(({ cell }, index) => {
        const spec = cell(item);
        const told = JSON.stringify(spec) ?? "";
        if (row.told[index] !== told) {
          row.told[index] = told;
          row.cells[index].replaceChildren(...content(spec));
        }
      });
    }
    for (const [key, row] of this.rows) {
      if (!there.has(key)) {
        row.node.remove();
        this.rows.delete(key);
      }
    }
    this.empty.hidden = there.size > 0;
    this.table.classList.toggle("is-empty", there.size === 0);
  }

  #made(key) {
    const cells = this.columns.map(({ head, num }) =>
      el("td", { role: "cell", "data-label": head, class: num && "num" }));
    const row = { node: el("tr", { role: "row" }, ...cells), cells, told: [] };
    this.rows.set(key, row);
    return row;
  }
}

// A figure under its name.
export class Tile {
  constructor(name) {
    this.value = el("strong", { text: "–" });
    this.node = el("div", { class: "tile" }, el("span", { text: name }), this.value);
  }

  update(text) {
    if (this.value.textContent !== String(text)) this.value.textContent = text;
  }
}
