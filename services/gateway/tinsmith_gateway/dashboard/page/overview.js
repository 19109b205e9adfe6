// The first page: what goes on.

import { get } from "./api.js";
import { CurveCharts, Curves } from "./curves.js";
import { el, Table, Tile } from "./dom.js";
import { runColumns } from "./runs.js";
import { ago, duration, last, number, percent, runLink, runName, size } from "./words.js";

const CURVES_SHOWN = 4;

export class OverviewPage {
  title = "Overview";

  constructor() {
    this.tiles = {
      live: new Tile("live runs"), rate: new Tile("training tokens/s"), waiting: new Tile("queued"),
      busy: new Tile("trainers busy"), errors: new Tile("recent errors"),
    };
    this.runs = new Table("Live runs", runColumns(), {
      key: (run) => run.model_id, empty: "No run is live. Start a training loop and it shows up here.",
    });
    this.curves = el("div", { class: "cards" });
    this.shown = new Map();
    this.problems = new Table("Problems", [
      { head: "What", cell: (one) => ({ text: one.what, tone: "bad" }) },
      { head: "Remedy", cell: (one) => one.remedy },
    ], { key: (one) => one.what, empty: "All is well." });
    this.errors = new Table("Recent errors", [
      { head: "When", cell: (one) => ago(one.at_s) },
      { head: "Run", cell: (one) => ({ text: runName(one.model_id), href: runLink(one.model_id) }) },
      { head: "Operation", cell: (one) => one.seq, num: true },
      { head: "Whose", cell: (one) => one.category },
      { head: "What", cell: (one) => one.message },
    ], { key: (one) => `${one.model_id}:${one.seq}`, empty: "No operation failed of late." });
    this.services = new Table("Services", [
      { head: "Instance", cell: (one) => one.instance },
      { head: "Serves", cell: (one) => one.base_models.map(last).join(", ") },
      { head: "Busy", cell: (one) => ("busy" in one.load ? { share: one.load.busy, text: percent(one.load.busy) } : null) },
      { head: "Models", cell: (one) => one.load.models, num: true },
      { head: "State", cell: (one) => (one.trouble ? { text: one.trouble, tone: "bad" } : one.is_taking ? { text: "ready", tone: "good" } : "draining") },
      { head: "Version", cell: (one) => one.version },
    ], { key: (one) => one.instance });
    this.queues = new Table("Queues", [
      { head: "Queue", cell: (one) => one.queue },
      { head: "Model", cell: (one) => one.of },
      { head: "Messages", cell: (one) => number(one.messages), num: true },
      { head: "Size", cell: (one) => one.size, num: true },
      { head: "Oldest", cell: (one) => one.oldest, num: true },
    ], { key: (one) => `${one.queue} ${one.of}` });
    this.pools = new Table("Sampler pools", [
      { head: "Model", cell: (one) => last(one.name) },
      { head: "Pool", cell: (one) => one.pool || "default" },
      { head: "Engine", cell: (one) => Object.values(one.labels).join(", ") },
      { head: "Samplers", cell: (one) => ({ text: one.instances, tone: one.instances ? undefined : "bad" }), num: true },
      { head: "Weights", cell: (one) => one.versions },
      { head: "Behind", cell: (one) => one.behind, num: true },
      { head: "Lag", cell: (one) => one.lag, num: true },
    ], { key: (one) => `${one.name} ${one.pool}`, empty: "No sampler was ever announced." });
    this.weights = new Table("Published weights", [
      { head: "Run", cell: (one) => ({ text: runName(one.lineage_id), href: runLink(one.lineage_id) }) },
      { head: "Version", cell: (one) => one.version, num: true },
      { head: "Changed", cell: (one) => density(one.versions.at(-1)), num: true },
      { head: "Size", cell: (one) => (one.versions.length ? size(one.versions.at(-1).size) : null), num: true },
      { head: "Served", cell: (one) => one.replicas.map((each) => `${each.replica}: ${each.version} ${each.state}`).join("; ") },
      { head: "Lag", cell: (one) => lag(one.replicas), num: true },
    ], { key: (one) => one.lineage_id, empty: "No model that is trained whole has published weights." });
    this.checkpoints = checkpointTable(true);
    this.usage = new Table("Usage per key", [
      { head: "Owner", cell: (one) => ({ text: one.name || one.owner, title: one.owner }) },
      { head: "Keys", cell: (one) => one.keys.map((end) => `…${end}`).join(" ") || "configured" },
      { head: "Trained, 24 h", cell: (one) => number(one.day.trained_tokens), num: true },
      { head: "Sampled, 24 h", cell: (one) => number(one.day.sampled_tokens), num: true },
      { head: "Trained", cell: (one) => number(one.all.trained_tokens), num: true },
      { head: "Prompts", cell: (one) => number(one.all.prefill_tokens + one.all.cached_tokens), num: true },
      { head: "Sampled", cell: (one) => number(one.all.sampled_tokens), num: true },
      { head: "Saves", cell: (one) => number(one.all.checkpoints), num: true },
      { head: "GB hours", cell: (one) => number(one.all.byte_seconds / 3.6e12), num: true },
    ], { key: (one) => one.owner, note: "Tokens; counted by the hour, some minutes late." });
    this.operator = [this.problems.node, this.services.node, this.queues.node];
    this.node = el("div", {},
      el("h1", { text: "Overview" }),
      el("div", { class: "tiles" }, ...Object.values(this.tiles).map((tile) => tile.node)),
      this.problems.node, this.runs.node, this.curves, this.errors.node, this.services.node, this.queues.node,
      this.pools.node, this.weights.node, this.checkpoints.node, this.usage.node);
  }

  async refresh() {
    const told = await get("overview");
    this.#show(told);
    await this.#curves(told.runs.slice(0, CURVES_SHOWN));
    return told.me;
  }

  #show(told) {
    const isOperator = told.me.is_operator;
    for (const node of this.operator) node.hidden = !isOperator;
    this.tiles.busy.node.hidden = !isOperator;
    const rates = Object.values(told.tokens_per_s);
    this.tiles.live.update(number(told.live_count));
    this.tiles.rate.update(number(Math.round(rates.reduce((a, b) => a + b, 0))));
    this.tiles.waiting.update(number(told.runs.reduce((a, run) => a + run.queued, 0)));
    this.tiles.errors.update(told.errors.length >= 20 ? "20+" : told.errors.length);
    this.runs.update(told.runs.map((run) => ({ ...run, rate: told.tokens_per_s[run.model_id] ?? 0 })));
    this.errors.update(told.errors);
    this.pools.update(pools(told));
    this.weights.update(told.lineages);
    this.checkpoints.update(told.checkpoints);
    this.usage.update(told.usage);
    if (!isOperator) return;
    const busy = told.services.filter((one) => "busy" in one.load).map((one) => one.load.busy);
    this.tiles.busy.update(busy.length ? percent(busy.reduce((a, b) => a + b, 0) / busy.length) : "–");
    this.problems.update(told.problems);
    this.services.update(told.services);
    this.queues.update(queues(told));
  }

  async #curves(runs) {
    const there = new Set(runs.map((run) => run.model_id));
    for (const [id, one] of this.shown) {
      if (!there.has(id)) {
        one.charts.close();
        one.node.remove();
        this.shown.delete(id);
      }
    }
    for (const { model_id: id, base_model: base } of runs) {
      if (!this.shown.has(id)) {
        const charts = new CurveCharts({ hasRate: false });
        const name = el("h2", {}, el("a", { href: runLink(id), text: `${runName(id)} on ${last(base)}` }));
        const node = el("section", { class: "card" }, name, charts.node);
        this.shown.set(id, { charts, node, curves: new Curves(id, 200) });
        this.curves.append(node);
      }
      const one = this.shown.get(id);
      try {
        one.charts.update(await one.curves.fetch());
      } catch (error) {
        if (one.node.children.length < 3) one.node.append(el("p", { class: "quiet", text: error.message }));
      }
    }
  }

  close() {
    for (const one of this.shown.values()) one.charts.close();
  }
}

export const density = (version) =>
  (!version ? null : version.form === "full" ? "all" : percent(version.changed / (version.elements || 1), 2));

const lag = (replicas) =>
  (replicas.length ? `${number(Math.max(...replicas.map((each) => each.lag_ms)), 2)} ms` : null);

export function checkpointTable(hasRun) {
  const run = { head: "Run", cell: (one) => ({ text: runName(one.run_id), href: runLink(one.run_id) }) };
  return new Table("Checkpoints", [
    { head: "Name", cell: (one) => ({ text: one.checkpoint_id, title: one.tinker_path }) },
    ...(hasRun ? [run] : []),
    { head: "Kind", cell: (one) => one.checkpoint_type },
    { head: "Size", cell: (one) => size(one.size_bytes), num: true },
    { head: "Saved", cell: (one) => ago(Date.parse(one.time) / 1000) },
    { head: "Expires", cell: (one) => (one.expires_at ? one.expires_at.slice(0, 16).replace("T", " ") : "never") },
    { head: "Public", cell: (one) => (one.public ? "yes" : "no") },
  ], { key: (one) => one.tinker_path, empty: "Nothing is saved under a name." });
}

// Placements are left out: a model that a trainer holds stays on that queue.
function queues({ queues: all, runs }) {
  return all.filter((queue) => queue.name !== "placements").flatMap((queue) => {
    const oldest = queue.messages ? duration(queue.oldest_s) : null;
    const whole = { queue: queue.name, of: "all", messages: queue.messages, size: size(queue.size), oldest };
    const counts = new Map();
    const add = (name, count) => counts.set(name, (counts.get(name) ?? 0) + count);
    for (const share of queue.shares) add(last(share.base_model) + (share.pool ? ` (${share.pool})` : ""), share.messages);
    if (queue.name === "ops") for (const run of runs) add(last(run.base_model), run.queued);
    const parts = [...counts].map(([of, messages]) => ({ queue: queue.name, of, messages, size: null, oldest: null }));
    return [whole, ...parts];
  });
}

function pools(told) {
  // Models that are trained whole are sampled from by the samplers of their base.
  const bases = new Map(told.runs.map((run) => [run.model_id, run.base_model.replace(/:full$/, "")]));
  return told.models.filter((model) => model.role === "sampler").map((model) => {
    const replicas = told.lineages.filter((one) => bases.get(one.lineage_id) === model.name).flatMap((one) => one.replicas);
    const versions = [...new Set(replicas.map((each) => each.version))].sort((a, b) => a - b);
    return {
      ...model,
      versions: versions.length ? `version ${versions.join(", ")}` : "by name",
      behind: replicas.length ? Math.max(...replicas.map((each) => each.behind)) : null,
      lag: lag(replicas),
    };
  });
}
