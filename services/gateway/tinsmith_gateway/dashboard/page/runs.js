// All runs, those that are over too.

import { get } from "./api.js";
import { el, Table } from "./dom.js";
import { ago, duration, last, number, runLink, runName, size } from "./words.js";

const PAGE = 50;

export function runColumns() {
  return [
    { head: "Run", cell: (run) => ({ text: runName(run.model_id), href: runLink(run.model_id), title: run.model_id }) },
    { head: "Base model", cell: (run) => last(run.base_model) },
    { head: "Owner", cell: (run) => ({ text: run.owner_name || run.owner.slice(0, 8), title: run.owner }) },
    { head: "Last op", cell: (run) => run.last_op, num: true },
    { head: "When", cell: (run) => ago(run.last_op_s) },
    { head: "Tokens/s", cell: (run) => number(Math.round(run.rate)), num: true },
    { head: "Queued", cell: (run) => run.queued, num: true },
    { head: "Waits for", cell: (run) => (run.waiting_turns ? `${run.waiting_turns} turns, ${run.waiting_tokens} tokens` : null) },
    { head: "Trainer", cell: (run) => ({ text: run.trainer, tone: run.trainer && !run.is_held ? "bad" : undefined }) },
    { head: "Checkpoints", cell: (run) => run.checkpoints, num: true },
  ];
}

export class RunsPage {
  title = "Runs";

  constructor() {
    this.offset = 0;
    this.filter = el("input", { type: "search", id: "filter", placeholder: "id, model or owner", oninput: () => this.#show() });
    this.table = new Table("Runs", [
      ...runColumns().filter(({ head }) => ["Run", "Base model", "Owner", "Last op", "Checkpoints"].includes(head)),
      { head: "Size", cell: (run) => size(run.checkpoint_bytes), num: true },
      { head: "Made", cell: (run) => ago(run.created_s) },
      { head: "State", cell: (run) => (run.is_live ? { text: "live", tone: "good" } : run.ended) },
    ], { key: (run) => run.model_id, empty: "No run." });
    this.count = el("span", { class: "quiet" });
    this.newer = el("button", { type: "button", text: "Newer", onclick: () => this.#turn(-PAGE) });
    this.older = el("button", { type: "button", text: "Older", onclick: () => this.#turn(PAGE) });
    this.runs = [];
    this.node = el("div", {},
      el("h1", { text: "Runs" }),
      el("p", { class: "bar" }, el("label", { for: "filter", text: "Filter this page" }), this.filter),
      this.table.node,
      el("p", { class: "bar" }, this.newer, this.older, this.count));
  }

  async refresh() {
    const told = await get(`runs?limit=${PAGE}&offset=${this.offset}`);
    this.runs = told.runs;
    const total = told.cursor.total_count;
    this.count.textContent = `${total ? this.offset + 1 : 0} to ${this.offset + told.runs.length} of ${total}`;
    this.newer.disabled = this.offset === 0;
    this.older.disabled = this.offset + PAGE >= total;
    this.#show();
    return null;
  }

  #show() {
    const words = this.filter.value.trim().toLowerCase();
    const text = (run) => `${run.model_id} ${run.base_model} ${run.owner_name} ${run.owner}`.toLowerCase();
    this.table.update(this.runs.filter((run) => text(run).includes(words)));
  }

  async #turn(by) {
    this.offset = Math.max(0, this.offset + by);
    await this.refresh().catch(() => {}); // the next look says what is wrong
  }

  close() {}
}
