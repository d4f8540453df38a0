// At a glance: is it balanced, what is it doing, what did the last rebalance bring.

import { $, element, figures, keyed, set, show, text } from "/static/dom.js";
import { ago, at, change, count, plural, size, stretches, took } from "/static/words.js";

const PHASES = ["idle", "preload", "stage", "swap"];

export function showOverview(state) {
  showSummary(state);
  showLast(state);
}

function showSummary(state) {
  const latest = state.last_score, score = latest?.measured == null ? null : latest;
  const { leader } = state.controller, none = latest ? "no tokens" : "–", alive = state.ranks.filter((one) => one.is_alive).length;
  const gain = score && Math.round(100 * (1 - score.measured / score.contiguous));
  const stepMs = state.ranks.map((rank) => rank.step_ms).filter((ms) => ms != null).toSorted((a, b) => a - b);
  const expected = state.ranks.filter((one) => !["retired", "joining"].includes(one.phase)).length;
  const open = state.membership?.operation?.ended === "" && state.membership;
  figures($("summary"), [
    ["imbalance now", score ? score.measured.toFixed(2) : none, "busiest rank over mean, 1.00 is perfect"],
    ["unbalanced", score ? score.contiguous.toFixed(2) : none,
      score ? `start placement: imbalance is ${gain ? `${Math.abs(gain)} % ${gain < 0 ? "higher" : "lower"}` : "the same"} now` : "start placement, same window"],
    ["doing", ...doing(state)],
    ["last rebalance", ...brought(state)],
    ["ranks that report", `${alive} of ${expected}`,
      [open && `operation ${open.operation.id}: ${open.phase}`, state.silent_ranks.length && `silent: ${stretches(state.silent_ranks)}`,
        state.token_age_s === null ? "no token yet" : `token ${ago(state.token_age_s)}`,
        stepMs.length && `step ${stepMs[stepMs.length >> 1].toFixed(1)} ms`].filter(Boolean).join("; ")],
    ["controller", leader ? "leads" : "none", leader],
  ]);
}

function doing(state) {
  const open = state.migration, last = state.decisions.at(-1);
  const decided = last ? `${last.decision} at ${at(last.time)}: ${last.reason}` : "no decision yet";
  if (open) return [`moving\u00a0${Math.round(100 * open.fraction)}\u00a0%`, `plan ${open.plan_id}, phase ${state.phase}, to generation ${open.target_generation}`];
  if (!state.movement) return ["paused", "movement is off: no weight moves"];
  return [state.observe ? "observing" : "idle", decided];
}

function brought(state) {
  const last = state.last_rebalance;
  if (last === null) return ["none", "since the service has read events"];
  if (last.ended === null) return ["open", `${plural(last.moves, "move")}, ${fixed(last.imbalance_before)} → ${fixed(last.imbalance_after)} predicted`];
  const when = `at ${at(last.ended)}`;
  if (last.outcome !== "committed") return [last.outcome, `${when}: ${last.end_reason}`];
  if (last.gain_realised == null) return ["committed", `${when}, not judged yet`];
  return [change(last.gain_realised), "of imbalance" + (last.gain_promised == null ? "" : `, ${change(last.gain_promised)} promised`) + `; ${when}`];
}

const fixed = (value) => (value == null ? "–" : value.toFixed(2));

function showLast(state) {
  const last = state.last_rebalance;
  if (last === null) return;
  text($("last-reason"), `${last.decision}, ${last.outcome ?? "open"}: ${last.reason}` +
    (last.outcome && last.outcome !== "committed" ? ` (${last.end_reason})` : ""));
  const pause = Math.max(...state.swap_pauses_ms, 0);
  figures($("last"), [
    ["when", ago(state.time - (last.ended ?? last.offered)), `${at(last.ended ?? last.offered)}, ` +
      (last.ended === null ? "open since" : `plan ${last.plan_id}, generation ${last.target_generation}`)],
    ["cost", `${plural(last.moves, "move")}`, `${size(last.bytes)}, ${last.ended === null ? "open" : took(last.ended - last.offered)}` +
      (pause ? `, pause ${pause.toFixed(1)} ms` : "")],
    ["predicted", `${fixed(last.imbalance_before)} → ${fixed(last.imbalance_after)}`, "imbalance"],
    ["realised", last.gain_realised == null ? "not judged" : change(last.gain_realised),
      last.trigger === "rollback" ? "a rollback promises no gain" : last.gain_promised == null ? "needs windows under the plan" : `imbalance, of ${change(last.gain_promised)} promised`],
    ["trigger", last.trigger || "unknown", [last.actor && `by ${last.actor}`, last.stage && `stage ${last.stage}`]
      .filter(Boolean).join(", ")],
  ]);
}

export function showMigration(state) {
  const open = state.migration, shown = [...PHASES, ...(state.phase === "aborted" ? ["aborted"] : [])];
  keyed($("phases"), shown, (phase) => phase, (phase) => element("li", {}, phase), (node, phase) => {
    set(node, { class: phase !== state.phase ? "" : phase === "aborted" ? "aborted" : "on" });
    if (phase === state.phase) set(node, { "aria-current": "step" });
    else node.removeAttribute("aria-current");
  });
  show($("progress"), open !== null);
  if (open !== null) {
    set($("progress"), { "aria-valuenow": Math.round(100 * open.fraction) });
    $("progress").firstChild.style.width = `${(100 * open.fraction).toFixed(1)}%`;
  }
  text($("migration"), open === null ? "No migration is open." :
    `Plan ${open.plan_id}: generation ${open.base_generation} → ${open.target_generation}, ` +
    `${open.applied} of ${plural(open.num_transactions, "transaction")} served, ` +
    `${Math.round(100 * open.staged_part)} % staged, ${plural(open.num_moves, "move")} in ${plural(open.layers.length, "layer")}`);
  text($("pace"), paceOf(state));
  showBytes(state);
}

function paceOf({ migration, decisions, pace }) {
  const own = migration && decisions.findLast((one) => one.plan_id === migration.plan_id)?.pace_reason;
  const since = pace.budget && pace.changed !== null ? `, since ${at(pace.changed)}` : "";
  return (own ? `Its pace: ${own}. ` : "") +
    `Pace of the next migration: ${pace.part === 1 ? "" : `${pace.part} of `}the deployment's own; ${pace.reason}${since}.`;
}

function showBytes(state) {
  const most = Math.max(1, ...Object.values(state.bytes_by_source));
  keyed($("bytes"), Object.entries(state.bytes_by_source), ([source]) => source,
    ([source]) => element("div", { class: "source" }, element("span", {}, source.replace("_", " ")),
      element("div", { class: "bar" }, element("span")), element("b")),
    (node, [, bytes]) => {
      node.children[1].firstChild.style.width = `${(100 * bytes) / most}%`;
      text(node.children[2], size(bytes));
    });
  const pauses = state.swap_pauses_ms.toSorted((a, b) => a - b);
  text($("pauses"), `${plural(state.experts_moved, "expert")} moved, ${plural(state.samples_stored, "sample")}, ` +
    `${count(state.samples_lost)} lost.` + (!pauses.length ? "" :
    ` Swap pause: median ${pauses[pauses.length >> 1].toFixed(2)} ms, longest ${pauses.at(-1).toFixed(2)} ms.`));
}
