// What is wrong, and what was: how grave, since when, and what to do.

import { ask } from "/static/app.js";
import { $, element, keyed, set, show, text } from "/static/dom.js";
import { at, took, when } from "/static/words.js";

const READ = 200, OPEN_SHOWN = 20, ENDED_SHOWN = 100;
const GRAVEST = ["critical", "warning", "notice"];

// By kind, as the procedures and alerts in docs/operations.md.
export const ADVICE = {
  "store-unread": "Check that the store answers from this host. Ranks serve without it.",
  "no-run": "Start the ranks, with this store.",
  "clocks-differ": "Synchronise the clocks (NTP); eplb check compares them.",
  "rank-silent": "Read the log of its host, and restart the rank. Nothing is planned while it is silent.",
  "no-tokens": "Do requests arrive? If so, read the events of kind error and the logs of the ranks.",
  "no-progress": "If only the mover hangs, the migration is dropped by itself. If no step completes, restart the rank.",
  "no-leader": "Start eplb serve or eplb controller. Ranks serve meanwhile, and nothing is balanced.",
  "rank-gone": "The others serve its experts. eplb launch starts it again to join them, or retire it: eplb retire.",
  "engine-plans": "Repair what the reason names: the plug-in then plans again by itself.",
  "rank-uncounted": "Switch observe on until its dispatcher counts.",
  "start-waits": "Start what the launcher waits for; then the ranks start by themselves.",
  "process-down": "Read its log. A process beyond its restart budget is started again each minute.",
  "disk-full": "Free room on the disk of the state folder. Ranks serve, and a pause is possible.",
  "store-full": "Give the store room: memory for Redis, else disk. Ranks serve, and a pause is possible.",
  "audit-waits": "Make the file of the audit writable: its lines follow by themselves.",
  "rank-frozen": "Remove the reason, then restart the rank.",
  unbalanced: "Read the reason of the last decision. Resume movement if it is paused; if slots are the limit, add redundancy.",
  "migrations-fail": "Follow the reasons of the events. Pause movement meanwhile if a source of bytes fails.",
  "rank-death": "Read eplb journal and the log of the rank.",
  "store-lost": "Turn persistence of the store on. Balancing goes on by itself.",
  "sample-refused": "Compare the versions and clocks of the ranks.",
  "plan-failed": "Read the message. The placement that serves stays.",
  error: "Read the log of the process that is named.",
  "gain-missed": "None if the next plan mends it. rollback_loss takes such plans back by rule.",
};

let open = [], ended = [];

export async function readAnomalies() {
  const { anomalies } = await ask(`anomalies?limit=${READ}`);
  const grave = (one) => GRAVEST.indexOf(one.severity);
  open = anomalies.filter((one) => one.until === null).sort((a, b) => grave(a) - grave(b) || b.since - a.since);
  ended = anomalies.filter((one) => one.until !== null).sort((a, b) => b.until - a.until);
}

export function showAnomalies(now) {
  const hidden = open.length - OPEN_SHOWN, latest = ended[0];
  text($("anomalies-count"), (open.length ? `${open.length} open` : "None is open") +
    (hidden > 0 ? `, the gravest ${OPEN_SHOWN} are shown` : "") +
    (latest ? `. ${ended.length} ended, the latest at ${at(latest.until)}: ${latest.text}` : ""));
  list($("anomalies"), open.slice(0, OPEN_SHOWN), now);
}

export function showEnded(now) {
  show($("none-ended"), !ended.length);
  list($("ended"), ended.slice(0, ENDED_SHOWN), now);
}

function list(host, anomalies, now) {
  show(host, anomalies.length > 0);
  keyed(host, anomalies, (one) => one.id, (one) => element("div", { class: "entry" },
    when(one.since), element("span", { class: "tag" }), element("span"),
    element("div", { class: "figures" }, element("span"), ADVICE[one.kind] ?? "")), (node, one) => {
    const [, tag, found, below] = node.children;
    set(tag, { class: `tag ${one.severity}` });
    text(tag, one.severity);
    text(found, one.text);
    const lasted = (one.until ?? now) - one.since;
    text(below.firstChild, `${one.kind}${one.until === null ? `, for ${took(lasted)}` : lasted ? `, lasted ${took(lasted)}` : ""}. `);
  });
}
