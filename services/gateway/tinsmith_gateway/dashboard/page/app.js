// What is shown and when it is looked at again: pages by the address, keys, the key.

import { forgetKey, hasKey, KeyNeeded, setKey } from "./api.js";
import { OverviewPage } from "./overview.js";
import { RunPage } from "./run.js";
import { RunsPage } from "./runs.js";

const LOOK_MS = 2000;
const SLOW_MS = 8000; // after an error
const part = (id) => document.getElementById(id);
let page = null;
let timer = 0;
let turn = 0;

function open() {
  const [, name, id] = location.hash.split("/");
  page?.close();
  if (name === "run" && id) page = new RunPage(decodeURIComponent(id));
  else page = name === "runs" ? new RunsPage() : new OverviewPage();
  document.title = `${page.title} · Tinsmith`;
  for (const link of document.querySelectorAll("[data-page]")) {
    if (link.dataset.page === (name || "overview")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  part("main").replaceChildren(page.node);
  look();
}

async function look() {
  clearTimeout(timer);
  if (document.hidden) return;
  const mine = (turn += 1);
  let wait = LOOK_MS;
  try {
    const me = await page.refresh();
    if (mine !== turn) return;
    show(me);
  } catch (error) {
    if (mine !== turn) return;
    if (error instanceof KeyNeeded) {
      ask(hasKey() ? error.message : "");
      return;
    }
    notice(error.message);
    wait = SLOW_MS;
  }
  timer = setTimeout(look, wait);
}

function show(me) {
  notice("");
  part("key-form").hidden = true;
  part("main").hidden = false;
  part("leave").hidden = !hasKey();
  if (me) part("who").textContent = `${me.name.slice(0, 24)}${me.is_operator ? " (operator)" : ""}`;
  document.body.dataset.ready = "yes";
}

function ask(why) {
  notice(why);
  part("main").hidden = true;
  part("leave").hidden = true;
  part("who").textContent = "";
  part("key-form").hidden = false;
  part("key").focus();
}

function notice(text) {
  if (part("notice").textContent !== text) part("notice").textContent = text;
}

part("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(part("key").value.trim());
  part("key").value = "";
  open();
});

part("leave").addEventListener("click", () => {
  forgetKey();
  location.hash = "#/";
  open();
});

part("help-button").addEventListener("click", () => part("help").showModal());

const SHORTCUTS = {
  "?": () => part("help").showModal(),
  o: () => { location.hash = "#/"; },
  r: () => { location.hash = "#/runs"; },
  j: () => move(1),
  k: () => move(-1),
  "/": () => document.getElementById("filter")?.focus(),
  c: () => page.copy?.(),
};

function move(by) {
  const links = [...document.querySelectorAll("main tbody a")].filter((link) => link.offsetParent !== null);
  const at = links.indexOf(document.activeElement);
  links[Math.max(0, Math.min(links.length - 1, at + by))]?.focus();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || part("help").open) return;
  if (event.target.closest("input, textarea, select")) return;
  const act = SHORTCUTS[event.key];
  if (act) {
    event.preventDefault();
    act();
  }
});

addEventListener("hashchange", () => {
  if (location.hash === "#main") return;
  open();
  part("main").focus({ preventScroll: true });
  scrollTo(0, 0);
});
document.addEventListener("visibilitychange", look);
open();
