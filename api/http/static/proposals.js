// Proposals: plans that wait for a decision, each with what it changes, and buttons to decide.

import { ask } from "/static/app.js";
import { $, element, keyed, set, show, text } from "/static/dom.js";
import { count, decisionFigures, parted, plural, size, took, when } from "/static/words.js";

const MOVES_SHOWN = 20, ENDED_SHOWN = 2, EXPIRED_SHOWN = 20, PERIOD_MS = 15000;
const TELLING = ["proposal", "commit", "publish"];

let proposals = [], due = 0, orders = null;

// An event tells of every change but one: a proposal expires by the clock.
export async function readProposals(fresh) {
  if (performance.now() < due && !(await fresh).some((one) => TELLING.includes(one.kind))) return;
  ({ proposals } = await ask("proposals"));
  due = performance.now() + PERIOD_MS;
}

export function showProposals(now) {
  const of = Object.groupBy(proposals, ({ state }) => (["open", "expired"].includes(state) ? state : "ended"));
  const expired = (of.expired ?? []).slice(0, EXPIRED_SHOWN);
  show($("proposals-section"), proposals.length > 0);
  show($("expired"), expired.length > 0);
  text($("expired").firstElementChild, `${plural(expired.length, "proposal")} that expired`);
  for (const [host, shown] of [[$("proposals"), [...of.open ?? [], ...(of.ended ?? []).slice(0, ENDED_SHOWN)]],
    [$("expired").lastElementChild, expired]]) {
    keyed(host, shown, (one) => one.id, entry, (node, one) => update(node, one, now));
  }
}

// `given.approve(one)` and `given.reject(one)` carry out what the user decides.
export function decideBy(given) {
  orders = given;
}

function entry(one) {
  const details = element("details", {}, element("summary", {}, "Moves and reasons"), element("div"));
  details.addEventListener("toggle", () => details.open && showContent(one.id, details.lastChild), { once: true });
  const approve = element("button", { type: "button", class: "strong" }, "Approve");
  const reject = element("button", { type: "button" }, "Reject");
  approve.addEventListener("click", () => orders.approve(one, approve));
  reject.addEventListener("click", () => orders.reject(one, reject));
  return element("div", { class: "entry" },
    when(one.time),
    element("div", {}, element("span", { class: "tag" }), element("b", {}, `Proposal ${one.id}: ${one.decision}. `), one.plan_reason),
    element("div", { class: "figures" }, ...parted(figuresOf(one))),
    element("div", { class: "figures" }),
    element("div", { class: "buttons" }, approve, reject),
    details);
}

function update(node, one, now) {
  const [, head, , story, buttons] = node.children;
  set(head.firstChild, { class: `tag ${one.state}` });
  text(head.firstChild, one.state);
  text(story, [`by ${one.by}`, one.reason !== one.plan_reason && one.reason, ending(one, now)].filter(Boolean).join(" · "));
  show(buttons, one.state === "open");
}

function ending(one, now) {
  if (one.state === "open") return `expires in ${took(Math.max(0, one.expires - now))}`;
  return [`${one.state}${one.ended_by && ` by ${one.ended_by}`}`, one.end_reason,
    one.plan_id && `plan ${one.plan_id}`].filter(Boolean).join(": ");
}

const figuresOf = (one) => [
  decisionFigures({ ...one, generation: null }), one.moves ? `${took(one.cost_s)} of serving time` : "",
  `generation ${one.base_generation} → ${one.target_generation}`,
].filter(Boolean).join(" · ");

async function showContent(id, host) {
  host.replaceChildren(element("p", { class: "quiet" }, "Reading the proposal."));
  try {
    const found = await ask(`proposals/${id}`);
    host.replaceChildren(...found.explanation.flatMap(reasons), ...moves(found), ...links(found));
  } catch (error) {
    host.replaceChildren(element("p", { class: "bad" }, error.message));
  }
}

const reasons = (layer) => [element("h3", {}, `Layer ${layer.layer}`),
  element("ul", {}, ...layer.sentences.map((sentence) => element("li", {}, sentence)))];

function moves(found) {
  if (!found.move_list.length) return [element("p", { class: "quiet" }, "No expert moves: only shares change.")];
  const rows = found.move_list.slice(0, MOVES_SHOWN).map((move) => element("tr", {},
    ...move.map((value) => element("td", {}, value === -1 ? "–" : String(value).replace("_", " ")))));
  const more = found.moves - rows.length;
  return [element("h3", {}, plural(found.moves, "move")),
    element("div", { class: "scroll" }, element("table", { class: "moves" },
      element("thead", {}, element("tr", {},
        ...["layer", "expert", "to slot", "source", "from slot"].map((name) => element("th", { scope: "col" }, name)))),
      element("tbody", {}, ...rows))),
    ...(more > 0 ? [element("p", { class: "note" }, `${count(more)} more: GET api/v1/proposals/${found.id}.`)] : [])];
}

function links(found) {
  const bytes = Object.entries(found.plan.bytes_by_link ?? {}).filter(([, sent]) => sent > 0);
  return bytes.length ? [element("p", { class: "note" }, "Bytes: " +
    bytes.map(([link, sent]) => `${link.replace("_", " ")} ${size(sent)}`).join(", ") + ".")] : [];
}
