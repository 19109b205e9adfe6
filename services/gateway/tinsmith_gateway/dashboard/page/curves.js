// The curves of one run: points that are fetched as they come, and what charts make of them.

import { get } from "./api.js";
import { Chart } from "./charts.js";
import { el } from "./dom.js";

const MAX_KEPT = 1200;
const IS_KL = /(^|[^a-z])kl([^a-z]|$)|log p/i;
const IS_REWARD = /reward|return|advantage/i;
const MAX_GAP = 8; // operations between two points whose times tell a rate

export class Curves {
  constructor(runId, points) {
    this.runId = runId;
    this.wanted = points;
    this.points = [];
    this.after = -1;
  }

  async fetch() {
    let told;
    do {
      const run = encodeURIComponent(this.runId);
      told = await get(`runs/${run}/curves?after=${this.after}&points=${this.wanted}`);
      this.points.push(...told.points);
      this.after = told.next;
      if (this.points.length > MAX_KEPT) this.points = this.points.filter((_, at) => at % 2 === 1);
    } while (told.has_more && told.points.length > 0);
    return this.points;
  }
}

const sum = (point, name) => point.metrics[`${name}:sum`];

// Of one point, name -> value: a mean where the server told a sum. Rewards are there when a loss of
// the client's own told them.
function derived(point) {
  const { metrics } = point;
  const found = {};
  const tokens = sum(point, "tokens") ?? point.tokens;
  if (sum(point, "loss") !== undefined) found["loss per token"] = sum(point, "loss") / (tokens || 1);
  const compared = sum(point, "compared"); // tokens that the sampler had told log-probabilities of
  if (compared) {
    found["KL (k3)"] = sum(point, "kl_k3") / compared;
    found["KL (k1)"] = sum(point, "kl_k1") / compared;
    found["|Δ log p|"] = sum(point, "dlogp") / compared;
  }
  for (const [name, value] of Object.entries(metrics)) {
    if (/^kl_k[13]:/.test(name)) continue; // told above
    if (IS_KL.test(name) || IS_REWARD.test(name)) found[name] = value;
  }
  return found;
}

const GROUPS = [
  ["Loss", (name) => name.startsWith("loss")],
  ["Reward", (name) => IS_REWARD.test(name)],
  ["KL to the sampler", (name) => IS_KL.test(name)],
];

export class CurveCharts {
  constructor({ hasRate = true } = {}) {
    this.node = el("div", { class: "charts" });
    this.charts = new Map();
    this.hasRate = hasRate;
  }

  update(points) {
    const told = points.map((point) => [point, derived(point)]);
    const names = [...new Set(told.flatMap(([, values]) => Object.keys(values)))];
    for (const [title, belongs] of GROUPS) {
      const shown = names.filter(belongs).slice(0, 3);
      const rows = told.filter(([, values]) => shown.some((name) => name in values));
      this.#show(title, shown, [
        rows.map(([point]) => point.seq),
        ...shown.map((name) => rows.map(([, values]) => values[name] ?? null)),
      ]);
    }
    if (this.hasRate) this.#rate(points.filter((point) => point.tokens > 0));
  }

  #rate(points) {
    const at = [[], []];
    points.forEach((point, index) => {
      const before = points[index - 1];
      if (before && point.seq - before.seq <= MAX_GAP && point.at_s > before.at_s) {
        at[0].push(point.seq);
        at[1].push(point.tokens / (point.at_s - before.at_s));
      }
    });
    this.#show("Training tokens per second", ["tokens/s"], at);
  }

  #show(title, series, data) {
    const name = `${title}|${series.join("|")}`;
    for (const [key, chart] of this.charts) {
      if (key.startsWith(`${title}|`) && key !== name) {
        chart.close();
        chart.node.remove();
        this.charts.delete(key);
      }
    }
    if (series.length === 0 || data[0].length === 0) return;
    let chart = this.charts.get(name);
    if (!chart) {
      chart = new Chart(title, series);
      this.charts.set(name, chart);
      this.node.append(chart.node);
    }
    chart.update(data);
  }

  close() {
    for (const chart of this.charts.values()) chart.close();
  }
}
