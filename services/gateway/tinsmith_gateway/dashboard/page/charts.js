// Charts by uPlot: colours of the theme, as wide as their place, with their newest values in words.

import { el } from "./dom.js";
import { number } from "./words.js";

const charts = new Set();
const HEIGHT = 170;
const WHOLE = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((step) => step * 10 ** power)).flat();

export class Chart {
  // series: names in order; x: "op" or another word for the axis.
  constructor(title, series, { x = "operation", format = number } = {}) {
    this.title = title;
    this.series = series;
    this.x = x;
    this.format = format;
    this.data = [[], ...series.map(() => [])];
    this.place = el("div", { class: "plot", role: "img" });
    this.caption = el("figcaption", {});
    this.node = el("figure", { class: "panel" }, this.caption, this.place);
    this.caption.textContent = title;
    charts.add(this);
    this.watch = new ResizeObserver(() => this.#fit());
    this.watch.observe(this.place);
  }

  update(data) {
    this.data = data;
    const newest = this.series.map((name, index) => {
      const value = data[index + 1].findLast((each) => each !== null && each !== undefined);
      return `${this.series.length > 1 ? `${name} ` : ""}${this.format(value ?? null)}`;
    }).join(", ");
    this.caption.textContent = `${this.title}: `;
    this.caption.append(el("strong", { text: newest }));
    const count = data[0].length;
    this.place.setAttribute("aria-label", `${this.title}: ${count} points, newest ${newest}`);
    this.node.hidden = count === 0;
    if (this.plot) this.plot.setData(data);
    else this.draw();
  }

  draw() {
    this.plot?.destroy();
    this.plot = null;
    const width = this.place.clientWidth;
    if (!width || this.data[0].length === 0) return;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = {
      stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 },
      ticks: { show: false }, font: "11px system-ui, sans-serif",
    };
    const strokes = [colour("--accent"), colour("--second"), colour("--third")];
    this.plot = new window.uPlot({
      width, height: HEIGHT,
      scales: { x: { time: false } },
      legend: { show: this.series.length > 1, live: false },
      cursor: { y: false },
      series: [
        { label: this.x },
        ...this.series.map((label, index) => ({
          label, stroke: strokes[index % strokes.length], width: 1.5, spanGaps: true,
          points: { show: this.data[0].length < 40, size: 4 },
          value: (_, value) => this.format(value),
        })),
      ],
      axes: [
        { ...axis, size: 28, incrs: WHOLE },
        { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => this.format(tick)) },
      ],
    }, this.data, this.place);
  }

  close() {
    this.watch.disconnect();
    this.plot?.destroy();
    charts.delete(this);
  }

  #fit() {
    if (this.plot) this.plot.setSize({ width: this.place.clientWidth, height: HEIGHT });
    else this.draw();
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of charts) chart.draw();
});
