// The page: polls the service every second, shows the answers, and posts the user's requests.

import { drawChart, drawExpertCanvas, drawRankTable, element } from "/static/draw.js";
import { count, plural, sentence, size } from "/static/words.js";

const PERIOD_MS = 1000, TIMEOUT_MS = 20000, WINDOWS_SHOWN = 400, EVENTS_SHOWN = 200;
const PHASES = ["idle", "preload", "stage", "swap"];
const $ = (id) => document.getElementById(id);
const api = (path) => `/api/v1/${path}`;

let state = null, imbalance = { windows: [], rebalances: [] }, events = [], lastEvent = 0;

async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, signal: AbortSignal.timeout(TIMEOUT_MS) });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.detail ?? `${response.status} from ${path}`);
  return answer;
}

function send(method, path, body) {
  const headers = { "Content-Type": "application/json" };
  return ask(api(path), { method, headers, body: JSON.stringify(body) });
}

async function readEvents() {
  for (;;) {
    const fresh = await ask(api(`events?after=${lastEvent}&limit=1000`));
    if (!fresh.length) return;
    lastEvent = fresh.at(-1).id;
    events = [...events, ...fresh].slice(-EVENTS_SHOWN);
  }
}

async function refresh() {
  try {
    [state, imbalance] = await Promise.all([
      ask(api("state")), ask(api(`imbalance?last=${WINDOWS_SHOWN}`)), readEvents(),
    ]);
    $("trouble").hidden = true;
    show();
  } catch (error) {
    $("trouble").textContent = `No new data: ${error.message}. Retrying.`;
    $("trouble").hidden = false;
  }
}

async function follow() {
  if (!document.hidden) await refresh();
  setTimeout(follow, PERIOD_MS);
}

// -- formats
const clock = (seconds) => new Date(seconds * 1000)
  .toLocaleTimeString("en-GB", { timeZoneName: "short" });
const when = (seconds) => element("time", { class: "when",
  datetime: new Date(seconds * 1000).toISOString(),
  title: new Date(seconds * 1000).toISOString() }, clock(seconds));

// -- pieces
function show() {
  showHeader();
  showSummary();
  showChart();
  showHeat();
  showMigration();
  showBytes();
  showDecisions();
  showEvents();
}

function list(pairs) {
  return pairs.map(([name, value, more]) => element("div", {}, element("dt", {}, name),
    element("dd", {}, value, ...(more ? [" ", element("small", {}, more)] : []))));
}

function showHeader() {
  const wrong = state.problems.length;
  $("health").textContent = `${state.verdict}: ${state.reason}`;
  $("health").className = `pill ${state.verdict}`;
  document.title = `${state.verdict}: ${state.deployment}`;
  $("problems").hidden = !wrong;
  $("problems").replaceChildren(...state.problems.map((one) => element("li", {}, one)));
  $("deployment").textContent = state.deployment + (state.run === null ? "" :
    `: ${plural(state.num_layers, "MoE layer")} × ${plural(state.num_experts, "expert")} in ` +
    `${plural(state.num_slots, "slot")}, run ${state.run}`);
  $("facts").replaceChildren(...list([
    ["generation", state.generation ?? "none"], ["step", count(state.step)], ["phase", state.phase],
  ]));
  $("switches").replaceChildren(
    element("li", { class: state.movement ? "good" : "bad" }, `movement ${state.movement ? "on" : "off"}`),
    element("li", { class: state.observe ? "bad" : "" }, `observe ${state.observe ? "on" : "off"}`));
  $("movement").textContent = state.movement ? "Pause movement" : "Resume movement";
}

function showSummary() {
  const score = state.last_score?.measured == null ? null : state.last_score, alive = state.ranks.length - state.silent_ranks.length;
  const gain = score && Math.round(100 * (1 - score.measured / score.contiguous));
  $("summary").replaceChildren(...list([
    ["imbalance now", score ? score.measured.toFixed(2) : state.last_score ? "no tokens" : "–", "busiest rank over mean"],
    ["unbalanced", score ? score.contiguous.toFixed(2) : "–", "start placement, same window"],
    ["gain", score ? `${gain} %` : "–", gain < 0 ? "more load on the busiest rank" : "less load on the busiest rank"],
    ["ranks that report", `${alive} of ${state.ranks.length}`, ""],
    ["controller", state.leader ? "leads" : state.starting ? "starting" : "none",
      state.leader || state.starting],
    ["moved so far", plural(state.experts_moved, "expert"),
      `${plural(state.samples_stored, "sample")}, ${count(state.samples_lost)} lost`],
  ]));
}

function showChart() {
  drawChart($("chart"), imbalance.windows, imbalance.rebalances, (score) => {
    $("readout").textContent = score === null ? "" :
      `steps ${score.first_step}–${score.last_step}: measured ${score.measured.toFixed(3)}, ` +
      `unbalanced ${score.contiguous.toFixed(3)}, generation ${score.generation}` +
      (score.is_migrating ? ", migrating" : "");
  });
}

function showHeat() {
  if (state.heatmap === null) {
    const nothing = element("p", { class: "quiet" }, "No window of load yet.");
    $("heatmap").replaceChildren(nothing);
    return;
  }
  const ranks = state.ranks.length, none = (count) => Array(count).fill(null);
  drawRankTable($("heatmap"), state.heatmap.map((row) => row ?? none(ranks)), state.layer_ids, state.node_of_rank, state.silent_ranks);
  const experts = state.expert_heat.map((row) => row ?? none(state.num_experts));
  drawExpertCanvas($("experts"), experts);
  showAxis($("experts-layers"), "layer", state.layer_ids);
  showAxis($("experts-numbers"), "expert", [...experts[0].keys()]);
  const hottest = Math.max(0, ...experts.flat()).toFixed(1);
  const latest = imbalance.windows.at(-1);
  $("heat-note").textContent = latest ?
    `Latest window, steps ${latest.first_step}–${latest.last_step}` +
    (latest.is_complete ? "." : ", incomplete: not every rank reported.") : "";
  const notes = state.ranks.filter((rank) => rank.frozen).map((rank) => `Migrations are disabled on rank ${rank.rank}: ${rank.frozen}.`);
  if (state.silent_ranks.length) notes.unshift(`Silent ranks: ${state.silent_ranks.join(", ")}.`);
  $("heat-note").textContent += ` ${notes.join(" ")}`;
  $("experts-note").textContent =
    `Same window; the hottest expert has ${hottest} × the mean of its layer.`;
}

// At most eight of the names, each beside the middle of its row or column.
function showAxis(host, title, names) {
  const gap = Math.ceil(names.length / 8);
  const ticks = names.map((name, at) => [name, at]).filter(([, at]) => at % gap === 0);
  host.replaceChildren(element("b", {}, title), ...ticks.map(([name, at]) => {
    const tick = element("span", {}, name);
    tick.style.setProperty("--at", `${(100 * (at + 0.5)) / names.length}%`);
    return tick;
  }));
}

function showMigration() {
  const open = state.migration;
  const phases = element("ul", { class: "phases", "aria-label": "Phase" }, ...PHASES.map((phase) =>
    element("li", phase === state.phase ? { class: "on", "aria-current": "step" } : {}, phase)));
  if (state.phase === "aborted") phases.append(element("li", { class: "aborted" }, "aborted"));
  if (open === null) {
    $("migration").replaceChildren(phases, element("p", { class: "quiet" }, "No migration is open."));
    return;
  }
  const fill = element("span");
  fill.style.width = `${(100 * open.fraction).toFixed(1)}%`;
  const bar = element("div", { class: "bar", role: "progressbar", "aria-valuemin": 0,
    "aria-valuemax": 100, "aria-valuenow": Math.round(100 * open.fraction),
    "aria-label": "Migration" }, fill);
  $("migration").replaceChildren(phases, bar,
    element("p", {}, `Plan ${open.plan_id}: generation ${open.base_generation} → ${open.target_generation}`),
    element("p", { class: "quiet" }, `${open.applied} of ${plural(open.num_transactions, "transaction")} served, ` +
      `${Math.round(100 * open.staged_part)} % staged, ${plural(open.num_moves, "move")} ` +
      `in ${plural(open.layers.length, "layer")}`));
}

function showBytes() {
  const most = Math.max(1, ...Object.values(state.bytes_by_source));
  $("bytes").replaceChildren(...Object.entries(state.bytes_by_source).map(([source, bytes]) => {
    const fill = element("span");
    fill.style.width = `${(100 * bytes) / most}%`;
    return element("div", { class: "source" }, element("span", {}, source.replace("_", " ")),
      element("div", { class: "bar" }, fill), element("b", {}, size(bytes)));
  }));
  const pauses = state.swap_pauses_ms.toSorted((a, b) => a - b);
  $("pauses").textContent = !pauses.length ? "" :
    `Swap pause: median ${pauses[pauses.length >> 1].toFixed(2)} ms, ` +
    `longest ${pauses.at(-1).toFixed(2)} ms of ${count(pauses.length)}.`;
}

function decisionFigures(decision) {
  const parts = [];
  if (decision.imbalance_before != null) {
    const after = decision.imbalance_after == null ? "" : ` → ${decision.imbalance_after.toFixed(2)}`;
    parts.push(`imbalance ${decision.imbalance_before.toFixed(2)}${after}`);
  }
  if (decision.moves) parts.push(`${plural(decision.moves, "move")}, ${size(decision.bytes ?? 0)}`);
  if (decision.policy) parts.push(`policy ${decision.policy}`);
  if (decision.generation != null) parts.push(`generation ${decision.generation}`);
  return parts.join(" · ");
}

function showList(host, entries, none) {
  const shown = entries.length ? entries : [element("p", { class: "quiet" }, none)];
  host.replaceChildren(...shown);
}

function showDecisions() {
  const entries = state.decisions.toReversed().map((decision) => element("div", { class: "entry" },
    when(decision.time),
    element("span", { class: `tag ${decision.decision}` }, decision.decision), decision.reason,
    element("div", { class: "figures" }, decisionFigures(decision))));
  showList($("decisions"), entries, "No decision yet: the controller waits for complete windows.");
}

function showEvents() {
  const entries = events.toReversed().map((event) => element("div", { class: "entry" },
    when(event.time), element("span", { class: `tag ${event.kind}` }, event.kind),
    element("span", { class: "figures" }, sentence(event))));
  showList($("events"), entries, "No event yet.");
}

// -- acts
function reason(otherwise) {
  return $("reason").value.trim() || otherwise;
}

async function act(button, doing, request) {
  button.disabled = true;
  $("answer").replaceChildren(element("p", { class: "quiet" }, doing));
  try {
    $("answer").replaceChildren(...await request());
  } catch (error) {
    $("answer").replaceChildren(element("p", { class: "bad" }, error.message));
  } finally {
    button.disabled = false;
    await refresh();
  }
}

async function rebalance(dryRun) {
  const why = reason(dryRun ? "dry run from the page" : "rebalance from the page");
  const task = await send("POST", "rebalances", { dry_run: dryRun, reason: why });
  if (task.state !== "done") {
    return [element("p", {}, `Task ${task.id} is ${task.state}: no answer of the controller yet.`)];
  }
  const result = task.result;
  return [
    element("p", {}, element("span", { class: `tag ${result.decision}` }, result.decision ?? "done"),
      result.reason ?? ""),
    element("p", { class: "quiet" }, decisionFigures({
      imbalance_before: result.before, imbalance_after: result.after, moves: result.num_moves,
      bytes: Object.values(result.bytes_by_link ?? {}).reduce((sum, bytes) => sum + bytes, 0),
      policy: result.policy, generation: result.base_generation,
    })),
    ...(result.published ? [element("p", {}, `Published as plan ${result.plan_id}.`)] : []),
  ];
}

$("dry-run").addEventListener("click", () =>
  act($("dry-run"), "Requesting a plan from the controller.", () => rebalance(true)));

$("rebalance").addEventListener("click", () => $("sure").showModal());
$("sure").addEventListener("close", () => {
  if ($("sure").returnValue !== "yes") return;
  $("sure").returnValue = "";
  act($("rebalance"), "Requesting a migration from the controller.", () => rebalance(false));
});

$("movement").addEventListener("click", () => {
  const verb = state?.movement === false ? "resume" : "pause";
  act($("movement"), "Setting the switch.", async () => {
    const control = await send("POST", verb, { reason: reason(`${verb}d from the page`) });
    return [element("p", {}, `Movement is ${control.movement ? "on" : "off"}.`)];
  });
});

new ResizeObserver(() => state && showChart()).observe($("chart"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => state && show());
follow();
