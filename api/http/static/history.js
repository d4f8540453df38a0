// What was decided, and what happened.

import { ask } from "/static/app.js";
import { $, element, keyed, set, show, text } from "/static/dom.js";
import { decisionFigures, origin, parted, realised, sentence, when } from "/static/words.js";

const READ = 1000, SHOWN = 200;

let events = [], lastEvent = null, isRead = false;

// Only the latest events are read, and these once they are shown: a store may have a hundred
// thousand. Plans, one for each window, would hide all others; they are in the list of decisions.
export async function readEvents(isShown) {
  const isFirst = isShown && !isRead;
  const { events: fresh } = await ask(isFirst ? `events?latest=${READ}` :
    lastEvent === null ? "events?latest=1" : `events?after=${lastEvent}&limit=${READ}`);
  if (isFirst) [events, isRead] = [[], true];
  lastEvent = fresh.at(-1)?.id ?? lastEvent ?? 0;
  const shown = fresh.filter((one) => one.kind !== "plan");
  if (shown.length) events = [...events, ...shown].slice(-SHOWN);
  return fresh;
}

export function showHistory(state) {
  showDecisions(state.decisions);
  show($("no-event"), !events.length);
  keyed($("events"), events.toReversed(), (one) => one.id, (one) => element("div", { class: "entry" },
    when(one.time), element("span", { class: `tag ${one.kind}` }, one.kind),
    element("span", { class: "figures" }, sentence(one))));
}

function showDecisions(decisions) {
  show($("no-decision"), !decisions.length);
  keyed($("decisions"), decisions.toReversed(), (one) => one.id, (one) => {
    const kind = one.reason.includes(" (not moved: ") ? "not moved" : one.decision;
    return element("div", { class: "entry" }, when(one.time), element("span", { class: `tag ${kind}` }, kind),
      one.reason, element("div", { class: "figures" }, ...parted(origin(one))),
      element("div", { class: "figures" }, ...parted(decisionFigures(one))), element("div"));
  }, (node, one) => {  // it comes later than the rest
    text(node.lastChild, realised(one));
    set(node.lastChild, { class: one.gain_realised < 0 ? "figures brought-by bad" : "figures brought-by" });
  });
}
