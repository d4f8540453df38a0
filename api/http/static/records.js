// Requests that the controller has not ended, and who changed what.

import { cancel } from "/static/acts.js";
import { ask } from "/static/app.js";
import { $, element, keyed, show, text } from "/static/dom.js";
import { when } from "/static/words.js";

const PERIOD_MS = 5000, CHANGES = 200;

let tasks = [], changes = [], unread = "", due = 0;

export async function readRecords() {
  if (performance.now() < due) return;
  const [running, queued] = await Promise.all([ask("tasks?state=running"), ask("tasks?state=queued"), readChanges()]);
  due = performance.now() + PERIOD_MS;
  tasks = [...running.tasks, ...queued.tasks];
}

async function readChanges() {
  if (unread) return;  // no audit, or not for this role: that does not change while the page is open
  try {
    const { entries } = await ask(`audit?limit=${CHANGES}`);
    // A change has a line when it is asked for and one with its outcome; newest first.
    changes = entries.filter((one, at, all) => all.findIndex((other) => other.request === one.request) === at);
  } catch (error) {
    unread = error.message;
  }
}

export function showRecords() {
  show($("no-task"), !tasks.length);
  show($("tasks"), tasks.length > 0);
  keyed($("tasks"), tasks, (one) => `${one.id} ${one.state}`, (one) => {
    const line = element("div", { class: "entry" }, when(one.time), element("span", { class: "tag" }, one.state),
      `${one.id}: ${one.kind}${one.request.reason ? `, ${one.request.reason}` : ""} `);
    if (one.state === "queued") line.append(stop(one));
    return line;
  });
  show($("no-change"), !changes.length);
  show($("changes"), changes.length > 0);
  text($("no-change"), unread || "No change yet.");
  keyed($("changes"), changes, (one) => one.number, (one) => element("div", { class: "entry" }, when(one.time),
    element("span", { class: /^2|done/.test(one.outcome) ? "tag" : "tag warning" }, one.outcome),
    `${one.action}${one.detail && ` (${one.detail})`}${one.reason && `: ${one.reason}`}`,
    element("div", { class: "figures" }, `${one.actor} (${one.role}), ${one.address}`)));
}

function stop(one) {
  const button = element("button", { type: "button", "aria-label": `Cancel request ${one.id}` }, "Cancel");
  button.addEventListener("click", async () => {
    await cancel(button, one.id);
    due = 0;
  });
  return button;
}
