// The ranks: what each holds and reports, and orders to cordon or drain one.

import { order } from "/static/acts.js";
import { ask } from "/static/app.js";
import { $, element, keyed, set, text } from "/static/dom.js";
import { ABSENT, ago, at, count, plural, stretches } from "/static/words.js";

const PERIOD_MS = 5000;
const PARTS = 8;  // of the rows out of sight, of which each turn changes one
const ORDERS = { open: ["cordon", "drain"], cordoned: ["uncordon", "drain"], draining: ["uncordon"], drained: ["uncordon"] };

let held = null, due = 0, turn = 0;

export async function readRanks(state, isForced = false) {
  if (state.run === null || (!isForced && performance.now() < due)) return;
  held = await ask("ranks");
  due = performance.now() + PERIOD_MS;
}

export function showRanks(state, heat) {
  if (state.run === null || held === null) return;
  const load = loads(state, heat), byState = Object.groupBy(held.ranks, (one) => one.state);
  const notes = [plural(state.ranks.length, "rank"), ...membersOf(state),
    state.silent_ranks.length && `${state.silent_ranks.length} silent`,
    ...["cordoned", "draining", "drained"].filter((name) => byState[name]).map((name) => `${byState[name].length} ${name}`),
    held.waits && `draining waits: ${held.waits}`, ...held.unmet,
    held.reason && `latest order at ${at(held.time)}: ${held.reason}`].filter(Boolean);
  keyed($("rank-note"), notes, (one) => one, (one) => element("span", {}, one));
  // Another run may have other ranks than those that were read last.
  const lines = held.ranks.filter((one) => state.ranks[one.rank]?.rank === one.rank)
    .map((one) => ({ ...one, name: nameOf(state.ranks[one.rank], one) }))
    .sort((a, b) => (a.name === "open") - (b.name === "open") || a.rank - b.rank);
  const places = new Map(lines.map((one, at) => [one.rank, at]));
  const isSeen = seen($("rank-table"));
  turn += 1;
  keyed($("rank-table"), lines, (one) => one.rank, made, (node, one) => {
    if (node.line?.name === one.name && !isSeen(places.get(one.rank)) && one.rank % PARTS !== turn % PARTS) return;
    const rank = state.ranks[one.rank], cells = node.children, { name } = one;
    node.line = one;
    text(cells[1], one.node);
    set(cells[2].firstChild, { class: name === "open" ? "tag" : `tag ${name === "gone" ? "silent" : name}`, title: rank.frozen });
    text(cells[2].firstChild, rank.is_alive || rank.has_ended || one.state === "open" || ABSENT.includes(name) ? name : `silent, ${one.state}`);
    text(cells[3], rank.age_s === null ? "never" : ago(rank.age_s));
    text(cells[4], load === null ? "–" : load[one.rank].toFixed(2));
    for (const [cell, ms] of [[5, rank.step_ms], [6, rank.wait_ms]]) text(cells[cell], ms === null ? "–" : `${ms.toFixed(1)} ms`);
    text(cells[7], count(one.experts));
    text(cells[8], count(one.sole_experts));
    text(cells[9], rank.generation);
    keyed(cells[10], state.membership.wanted.includes(one.rank) && rank.phase !== "joining" ? ORDERS[one.state] : [], (verb) => verb, (verb) => {
      const button = element("button", { type: "button", "aria-label": `${verb} rank ${one.rank}` }, verb);
      button.addEventListener("click", async () => {
        await order(button, verb, node.line);
        due = 0;
      });
      return button;
    });
  });
}

const nameOf = (rank, { state }) => (ABSENT.includes(rank.phase) ? rank.phase : rank.has_ended ? "ended" : !rank.is_alive ? "silent" : rank.frozen ? "frozen" : state);

// Which ranks serve and should, where these are not all, and the latest operation on them.
export function membersOf({ ranks, membership }) {
  const { members, wanted, phase, waits, operation: one, safe_to_delete: free, epoch } = membership;
  return [members.length < ranks.length && `${members.length} serve (epoch ${epoch})`,
    phase !== "settled" && `${phase}: ${waits}`,
    wanted.length < ranks.length && `wanted: ${stretches(wanted)}`,
    one && `operation ${one.id} (${one.reason}) ${one.ended ? `is ${one.ended}: ${one.why}` : "is open"}`,
    free.length && `safe to delete: ${stretches(free)}`].filter(Boolean);
}

// Whether the row at a place is in sight, all being of one height.
function seen(body) {
  const box = body.closest(".scroll"), height = body.firstChild?.offsetHeight ?? 0;
  const first = box.scrollTop / height - 2, last = (box.scrollTop + box.clientHeight) / height;
  return (at) => !height || (at >= first && at <= last);
}

const made = (one) => element("tr", {}, element("th", { scope: "row" }, one.rank), element("td", { class: "more" }),
  element("td", {}, element("span", { class: "tag" })), element("td", { class: "more" }), element("td"),
  ...[0, 1, 2, 3, 4].map(() => element("td", { class: "more" })), element("td", { class: "orders" }));

// [R] over the layers that have tokens; null without any.
function loads(state, heat) {
  const rows = (heat?.run === state.run ? heat.ranks : []).filter((row) => row !== null);
  return rows.length ? state.ranks.map((_, rank) => rows.reduce((sum, row) => sum + row[rank], 0) / rows.length) : null;
}
