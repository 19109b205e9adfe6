// A run's page: its curves, its chain, its log, what was saved, and how to do it again.

import { get } from "./api.js";
import { Chart } from "./charts.js";
import { CurveCharts, Curves } from "./curves.js";
import { el, Table, Tile } from "./dom.js";
import { checkpointTable, density } from "./overview.js";
import { ago, number, percent, runName, short, size } from "./words.js";

export class RunPage {
  constructor(id) {
    this.id = id;
    this.title = `Run ${runName(id)}`;
    this.tiles = {
      state: new Tile("state"), op: new Tile("last operation"), when: new Tile("committed"),
      rate: new Tile("training tokens/s"), queued: new Tile("queued"), trainer: new Tile("trainer"),
    };
    this.about = el("dl", { class: "facts" });
    this.charts = new CurveCharts();
    this.curves = new Curves(id, 500);
    this.curveError = el("p", { class: "quiet" });
    this.chain = el("dl", { class: "facts" });
    this.commands = el("div", { class: "commands" });
    this.weights = el("div", { class: "charts" });
    this.density = new Chart("Elements changed", ["share"], { x: "version", format: (v) => (v === null ? "–" : percent(v, 2)) });
    this.bytes = new Chart("Bytes of a version", ["bytes"], { x: "version", format: (v) => (v === null ? "–" : size(v)) });
    this.weights.append(this.density.node, this.bytes.node);
    this.density.node.hidden = this.bytes.node.hidden = true;
    this.versions = new Table("Published weights", [
      { head: "Version", cell: (one) => one.version, num: true },
      { head: "Form", cell: (one) => one.form },
      { head: "Changed", cell: density, num: true },
      { head: "Size", cell: (one) => size(one.size), num: true },
      { head: "When", cell: (one) => ago(one.at_s) },
    ], { key: (one) => `${one.version} ${one.form}` });
    this.replicas = new Table("Who serves them", [
      { head: "Replica", cell: (one) => one.replica },
      { head: "State", cell: (one) => ({ text: one.state, tone: one.state === "fenced" ? "bad" : undefined }) },
      { head: "Version", cell: (one) => one.version, num: true },
      { head: "Behind", cell: (one) => one.behind, num: true },
      { head: "Lag", cell: (one) => `${number(one.lag_ms, 2)} ms`, num: true },
    ], { key: (one) => one.replica });
    this.checkpoints = checkpointTable(false);
    this.log = new Table("End of the log, newest first", [
      { head: "Op", cell: (one) => (one.seq < 0 ? null : one.seq), num: true },
      { head: "Epoch", cell: (one) => one.epoch, num: true },
      { head: "Entry", cell: (one) => ({ text: one.kind, tone: one.kind === "Failed" ? "bad" : undefined }) },
      { head: "State", cell: (one) => ({ text: short(one.state_blake3), title: one.state_blake3 }) },
      { head: "What", cell: (one) => said(one.details) },
    ], { key: (one) => one.blake3, empty: "The log has no entry yet." });
    this.node = el("div", {},
      el("h1", { text: "Run " }, el("code", { text: id })),
      el("div", { class: "tiles" }, ...Object.values(this.tiles).map((tile) => tile.node)),
      this.about, this.commands, this.curveError, this.charts.node,
      el("section", { class: "panel" }, el("h2", { text: "Chain" }), this.chain),
      this.weights, this.versions.node, this.replicas.node, this.checkpoints.node, this.log.node);
  }

  async refresh() {
    const told = await get(`runs/${encodeURIComponent(this.id)}`);
    this.#show(told);
    try {
      this.charts.update(await this.curves.fetch());
      this.curveError.textContent = "";
    } catch (error) {
      this.curveError.textContent = error.message;
    }
    return null;
  }

  #show({ run, log, lineage, commands, checkpoints, tokens_per_s: rate, user_metadata: metadata }) {
    this.tiles.state.update(run?.is_live ? "live" : run?.ended ?? "–");
    this.tiles.op.update(number(log.last_op));
    this.tiles.when.update(ago(run?.last_op_s));
    this.tiles.rate.update(number(Math.round(rate)));
    this.tiles.queued.update(number(run?.queued ?? 0));
    this.tiles.trainer.update(run?.trainer ? `${run.trainer}${run.is_held ? "" : " (gone)"}` : "–");
    facts(this.about, {
      "Base model": run?.base_model, Adapter: run?.rank ? `rank ${run.rank}` : "all weights", Optimizer: run?.optimizer,
      Owner: run?.owner_name || run?.owner, Project: run?.project_id, Made: ago(run?.created_s), ...metadata,
    });
    facts(this.chain, {
      Head: log.head, "State after its last change": log.state_blake3 || "older than what is shown here",
      Epoch: log.epoch,
      "The entries below": log.is_linked ? "link up: each names the digest of the one before it" : "DO NOT LINK UP",
      "The whole log": `${commands.verify} checks it`,
    });
    this.chain.classList.toggle("bad", !log.is_linked);
    if (!this.commands.hasChildNodes()) this.#commands(commands);
    this.checkpoints.update(checkpoints);
    this.log.update([...log.lines].reverse());
    const versions = lineage?.versions ?? [];
    this.versions.node.hidden = this.replicas.node.hidden = !lineage;
    if (!lineage) return;
    this.versions.update([...versions].reverse().slice(0, 20));
    this.replicas.update(lineage.replicas);
    const deltas = versions.filter((one) => one.form === "delta");
    this.density.update([deltas.map((one) => one.version), deltas.map((one) => one.changed / (one.elements || 1))]);
    this.bytes.update([versions.map((one) => one.version), versions.map((one) => one.size)]);
  }

  #commands({ replay, show }) {
    const button = el("button", { type: "button", id: "copy", text: "Copy replay command", onclick: () => this.copy() });
    this.told = el("span", { role: "status", class: "quiet" });
    this.replay = el("code", { text: replay });
    this.commands.append(button, this.replay, this.told, el("code", { text: show }));
  }

  async copy() {
    try {
      await navigator.clipboard.writeText(this.replay.textContent);
      this.told.textContent = "copied";
    } catch { // no clipboard without HTTPS
      getSelection().selectAllChildren(this.replay);
      this.told.textContent = "selected; copy it with Ctrl-C";
    }
  }

  close() {
    this.charts.close();
    this.density.close();
    this.bytes.close();
  }
}

function facts(list, told) {
  const shown = Object.entries(told).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const state = JSON.stringify(shown);
  if (list.dataset.told === state) return;
  list.dataset.told = state;
  list.replaceChildren(...shown.map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", { text: value }))));
}

function said(details) {
  return Object.entries(details).filter(([, value]) => value !== null).map(([name, value]) => {
    if (typeof value === "object") return said(value);
    return `${name} ${typeof value === "number" ? number(value) : value}`;
  }).join(", ");
}
