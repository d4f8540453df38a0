// The page: polls the service, shows the answers, and posts the user's requests.

import { Chart } from "/static/chart.js";
import { $, element, figures, keyed, set, show, text } from "/static/dom.js";
import { drawExperts, drawRanks, readOut } from "/static/heat.js";
import { act } from "/static/acts.js";
import { readProposals, showProposals } from "/static/proposals.js";
import { ago, change, count, decisionFigures, origin, parted, plural, realised, sentence, size, took, when } from "/static/words.js";

const PERIOD_MS = 1000, TIMEOUT_MS = 20000, EVENTS_READ = 1000, EVENTS_SHOWN = 200, POINTS = 400;
const PHASES = ["idle", "preload", "stage", "swap"];
const RANGES = [900, 3600, 86400];

let state = null, history = null, events = [], lastEvent = null, historyDue = 0;

const chart = new Chart($("chart"), (point) => text($("readout"), point === null ? "" :
  `${new Date(point.time * 1000).toLocaleTimeString("en-GB")}: measured ${point.measured.toFixed(3)}, ` +
  `unbalanced ${point.contiguous.toFixed(3)}, generation ${point.generation}` +
  (point.is_migrating ? ", migrating" : "")));

export async function ask(path, options = {}) {
  const response = await fetch(`/api/v1/${path}`, { ...options, signal: AbortSignal.timeout(TIMEOUT_MS) });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.detail ?? `${response.status} from ${path}`);
  return answer;
}

// Only the latest events are read: a store may have a hundred thousand. Plans, one for each window,
// would hide all others; they are in the list of decisions.
async function readEvents() {
  const fresh = await ask(lastEvent === null ? `events?latest=${EVENTS_READ}` :
    `events?after=${lastEvent}&limit=1000`);
  lastEvent = fresh.at(-1)?.id ?? lastEvent ?? 0;
  const shown = fresh.filter((one) => one.kind !== "plan");
  if (shown.length) events = [...events, ...shown].slice(-EVENTS_SHOWN);
  await readProposals(fresh);
}

// The range is the page's address, so that a view can be sent to someone.
const range = () => {
  const asked = Number(/range=(\d+)/.exec(location.hash)?.[1]);
  return RANGES.includes(asked) ? asked : RANGES[0];
};

async function readHistory() {
  if (performance.now() < historyDue) return;
  const seconds = range();
  const found = await ask(`history?seconds=${seconds}&points=${POINTS}`);
  if (seconds !== range()) return;  // another range was chosen meanwhile
  history = found;
  historyDue = performance.now() + Math.min(60, seconds / POINTS) * 1000 - PERIOD_MS / 2;
}

export async function refresh() {
  try {
    const [found] = await Promise.all([ask("state"), readHistory(), readEvents()]);
    state = found;
    show($("trouble"), false);
    draw();
  } catch (error) {
    text($("trouble"), `No new data: ${error.message}. Retrying.`);
    show($("trouble"), true);
    if (state === null || Date.now() / 1000 - state.time > 5) showVerdict("blind", "the service does not answer this page");
  }
}

async function follow() {
  if (!document.hidden) await refresh();
  setTimeout(follow, PERIOD_MS);
}

function draw() {
  const started = performance.now();
  showVerdict(state.verdict, state.reason);
  showHeader();
  showSummary();
  showLast();
  showMigration();
  if (history !== null) chart.draw(history);
  showHeat();
  showBytes();
  showProposals(state.time);
  showDecisions();
  showEvents();
  performance.measure("draw", { start: started });
}

// -- pieces
function showVerdict(grade, reason) {
  set($("verdict"), { class: `verdict ${grade}` });
  text($("grade"), grade);
  text($("why"), reason);
  const title = `${grade}: ${state?.deployment ?? "EPLB"}`;
  if (document.title !== title) document.title = title;
}

function showHeader() {
  const further = state.problems.slice(1);
  show($("problems"), further.length > 0);
  keyed($("problems"), further, (one) => one.split(",")[0], () => element("li"), text);
  text($("deployment"), state.deployment + (state.run === null ? "" :
    `: ${plural(state.num_layers, "MoE layer")} × ${plural(state.num_experts, "expert")} in ` +
    `${plural(state.num_slots, "slot")}, run ${state.run}`));
  figures($("facts"), [["generation", state.generation ?? "none"], ["step", count(state.step)],
    ["phase", state.phase]]);
  for (const [name, isOn, isGood] of [["movement", state.movement, state.movement],
    ["observe", state.observe, !state.observe]]) {
    text($(`${name}-on`), `${name} ${isOn ? "on" : "off"}`);
    set($(`${name}-on`), { class: isGood ? "good" : "bad" });
  }
  text($("movement"), state.movement ? "Pause movement" : "Resume movement");
}

function showSummary() {
  const latest = state.last_score, score = latest?.measured == null ? null : latest;
  const none = latest ? "no tokens" : "–", alive = state.ranks.length - state.silent_ranks.length;
  const gain = score && Math.round(100 * (1 - score.measured / score.contiguous));
  const stepMs = state.ranks.map((rank) => rank.step_ms).filter((ms) => ms != null).toSorted((a, b) => a - b);
  figures($("summary"), [
    ["imbalance now", score ? score.measured.toFixed(2) : none, "busiest rank over mean"],
    ["unbalanced", score ? score.contiguous.toFixed(2) : none, "start placement, same window"],
    ["gain", score ? `${gain} %` : "–", gain < 0 ? "more load on the busiest rank" : "less load on the busiest rank"],
    ["newest token", state.token_age_s === null ? "none" : ago(state.token_age_s),
      stepMs.length ? `step ${stepMs[stepMs.length >> 1].toFixed(1)} ms` : ""],
    ["ranks that report", `${alive} of ${state.ranks.length}`,
      state.silent_ranks.length ? `silent: ${few(state.silent_ranks)}` : ""],
    ["controller", state.leader ? "leads" : state.starting ? "starting" : "none",
      state.leader || state.starting],
  ]);
}

const few = (ranks) => ranks.slice(0, 12).join(", ") + (ranks.length > 12 ? `, and ${ranks.length - 12} more` : "");

function showLast() {
  const last = state.last_rebalance;
  if (last === null) return;
  text($("last-reason"), `${last.decision}, ${last.outcome ?? "open"}: ${last.reason}` +
    (last.outcome && last.outcome !== "committed" ? ` (${last.end_reason})` : ""));
  const fixed = (value) => (value == null ? "–" : value.toFixed(2));
  const pause = Math.max(...state.swap_pauses_ms, 0);
  figures($("last"), [
    ["when", ago(state.time - (last.ended ?? last.offered)), last.ended === null ? "open since" : `plan ${last.plan_id}, generation ${last.generation}`],
    ["cost", `${plural(last.moves, "move")}`, `${size(last.bytes)}, ${last.ended === null ? "open" : took(last.ended - last.offered)}` +
      (pause ? `, pause ${pause.toFixed(1)} ms` : "")],
    ["predicted", `${fixed(last.imbalance_before)} → ${fixed(last.imbalance_predicted)}`, "imbalance"],
    ["realised", last.gain_realised == null ? "not judged" : change(last.gain_realised),
      last.trigger === "rollback" ? "a rollback promises no gain" : last.gain_promised == null ? "needs windows under the plan" : `imbalance, of ${change(last.gain_promised)} promised`],
    ["trigger", last.trigger || "unknown", [last.actor && `by ${last.actor}`, last.stage && `stage ${last.stage}`]
      .filter(Boolean).join(", ")],
  ]);
}

function showMigration() {
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
  const pace = state.pace, since = pace.budget && pace.changed !== null ? `, ${ago(state.time - pace.changed)}` : "";
  text($("pace"), `Pace of the next migration: ${pace.part} of the deployment's own; ${pace.reason}${since}.`);
}

function showHeat() {
  if (state.heatmap === null) return;
  const hosts = { table: $("heatmap"), picture: $("rank-picture"), canvas: $("ranks"),
    layers: $("rank-layers"), ranks: $("rank-numbers"), silent: $("rank-silent") };
  drawRanks(hosts, state.heatmap, state.layer_ids, state.node_of_rank, state.silent_ranks);
  drawExperts({ canvas: $("experts"), layers: $("experts-layers"), numbers: $("experts-numbers") },
    state.expert_heat, state.layer_ids, state.num_experts);
  const worst = worstLayer(), frozen = state.ranks.filter((rank) => rank.frozen);
  text($("heat-note"), ["Latest window.", worst,
    ...state.ranks.filter((rank) => rank.cordon).slice(0, 3).map((rank) => rank.cordon === "drain"
      ? `Rank ${rank.rank} is drained by order: it is to hold no expert.` : `Rank ${rank.rank} is cordoned: it takes no further experts.`),
    ...frozen.slice(0, 3).map((rank) => `Migrations are disabled on rank ${rank.rank}: ${rank.frozen}.`)].join(" "));
  const hottest = Math.max(0, ...state.expert_heat.flatMap((row) => row ?? []));
  text($("experts-note"), `Same window; the hottest expert has ${hottest.toFixed(1)} × the mean of its layer.`);
}

function worstLayer() {
  let worst = { ratio: 0 };
  state.heatmap.forEach((row, at) => row?.forEach((ratio, rank) => {
    if (ratio > worst.ratio) worst = { ratio, rank, layer: state.layer_ids[at] };
  }));
  if (!worst.ratio) return "No layer has tokens.";
  return `Worst: layer ${worst.layer}, rank ${worst.rank} with ${worst.ratio.toFixed(2)} × mean.`;
}

function showBytes() {
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

function showDecisions() {
  show($("no-decision"), !state.decisions.length);
  keyed($("decisions"), state.decisions.toReversed(), (one) => one.id, (one) => {
    const kind = one.reason.includes(" (not moved: ") ? "HELD" : one.decision;
    return element("div", { class: "entry" }, when(one.time), element("span", { class: `tag ${kind}` }, kind),
      one.reason, element("div", { class: "figures" }, ...parted(origin(one))),
      element("div", { class: "figures" }, ...parted(decisionFigures(one))), element("div"));
  }, (node, one) => {  // it comes later than the rest
    text(node.lastChild, realised(one));
    set(node.lastChild, { class: one.gain_realised < 0 ? "figures brought-by bad" : "figures brought-by" });
  });
}

function showEvents() {
  show($("no-event"), !events.length);
  keyed($("events"), events.toReversed(), (one) => one.id, (one) => element("div", { class: "entry" },
    when(one.time), element("span", { class: `tag ${one.kind}` }, one.kind),
    element("span", { class: "figures" }, sentence(one))));
}

// -- the user
function showRange() {
  for (const button of $("ranges").children) {
    set(button, { "aria-pressed": Number(button.dataset.seconds) === range() });
  }
}

$("ranges").addEventListener("click", (event) => {
  if (event.target.dataset.seconds) location.hash = `range=${event.target.dataset.seconds}`;
});
addEventListener("hashchange", () => { showRange(); historyDue = 0; refresh(); });
act(() => state);
readOut($("ranks"), $("rank-readout"));
readOut($("experts"), $("expert-readout"));
new ResizeObserver(() => history && chart.draw(history)).observe($("chart"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => state && draw());
showRange();
follow();
