// The page: polls the service of one deployment and draws the view that its address names.

import { act } from "/static/acts.js";
import { readAnomalies, showAnomalies, showEnded } from "/static/anomalies.js";
import { Chart } from "/static/chart.js";
import { $, element, figures, keyed, set, show, text } from "/static/dom.js";
import { readEvents, showHistory } from "/static/history.js";
import { showLoad } from "/static/load.js";
import { showMigration, showOverview } from "/static/overview.js";
import { readProposals, showProposals } from "/static/proposals.js";
import { readRanks, showRanks } from "/static/ranks.js";
import { readRecords, showRecords } from "/static/records.js";
import { at, count, plural } from "/static/words.js";

const PERIOD_MS = 1000, TIMEOUT_MS = 20000, LIST_MS = 5000, SILENT_MS = 5000, POINTS = 400;
const RANGES = [900, 3600, 86400];
const VIEWS = ["overview", "load", "ranks", "history"];

let state = null, heat = null, history = null, historyDue = 0, listDue = 0, readAt = -Infinity;

const chart = new Chart($("chart"), (point) => text($("readout"), point === null ? "" :
  `${at(point.time)}: measured ${point.measured.toFixed(3)}, ` +
  `unbalanced ${point.contiguous.toFixed(3)}, generation ${point.generation}` +
  (point.is_migrating ? ", migrating" : "")));

// Relative to the page, which is at / or, for a deployment of several, at /deployments/NAME/.
export async function ask(path, options = {}) {
  const response = await fetch(`api/v1/${path}`, { ...options, signal: AbortSignal.timeout(TIMEOUT_MS) });
  const answer = await response.json();
  if (!response.ok) throw Object.assign(new Error(answer.detail ?? `${response.status} from ${path}`), { type: answer.type });
  return answer;
}

// The address has the view and its range, so that it can be sent to someone: #view=load, #range=3600.
const address = () => new URLSearchParams(location.hash.slice(1));
const chosen = (among, asked) => (among.includes(asked) ? asked : among[0]);
const view = () => chosen(VIEWS, address().get("view"));
const range = () => chosen(RANGES, Number(address().get("range")));
const addressWith = (changes) => `#${new URLSearchParams({ ...Object.fromEntries(address()), ...changes })}`;

async function readHistory() {
  if (view() !== "overview" || performance.now() < historyDue) return;
  const seconds = range();
  const found = await ask(`history?seconds=${seconds}&points=${POINTS}`);
  if (seconds !== range()) return;  // another range was chosen meanwhile
  history = found;
  historyDue = performance.now() + Math.min(60, seconds / POINTS) * 1000 - PERIOD_MS / 2;
}

async function readDeployments() {
  if (performance.now() < listDue) return;
  listDue = performance.now() + LIST_MS;
  const { deployments } = await ask("deployments");
  show($("deployments"), deployments.length > 1);
  keyed($("deployments"), deployments, (one) => one.name, (one) => element("option", { value: one.path }),
    (node, one) => text(node, `${one.name}: ${one.verdict}`));
  const here = deployments.find((one) => one.path === location.pathname) ?? deployments.find((one) => one.is_default);
  if (document.activeElement !== $("deployments")) $("deployments").value = here.path;
}

export async function refresh() {
  // Each answer is shown whatever becomes of the others: the state is known without the store.
  const events = readEvents(view() === "history"), asked = ask("state");
  const answers = await Promise.allSettled([asked, ["load", "ranks"].includes(view()) ? ask("heat") : heat,
    readHistory(), events, readProposals(events), readAnomalies(), readDeployments(),
    view() === "ranks" ? asked.then((seen) => readRanks(seen)) : null, view() === "history" ? readRecords() : null]);
  if (answers[0].status === "fulfilled") [state, readAt] = [answers[0].value, performance.now()];
  if (answers[1].status === "fulfilled") heat = answers[1].value;
  const failed = answers.find((one) => one.status === "rejected");
  if (failed) text($("trouble"), `No new data: ${failed.reason.message}. Retrying.`);
  show($("trouble"), failed !== undefined);
  if (state !== null) draw();
  if (answers[0].status === "rejected" && performance.now() - readAt > SILENT_MS) showVerdict("blind", "the service does not answer this page");
}

async function follow() {
  if (!document.hidden) await refresh();
  setTimeout(follow, PERIOD_MS);
}

const DRAWN = {
  overview() {
    showOverview(state);
    showAnomalies(state.time);
    showProposals(state.time);
    showMigration(state);
    if (history !== null) chart.draw(history);
  },
  load: () => showLoad(state, heat),
  ranks: () => showRanks(state, heat),
  history() {
    showHistory(state);
    showEnded(state.time);
    showRecords();
  },
};

function draw() {
  const started = performance.now();
  showVerdict(state.verdict, state.reason);
  showHeader();
  DRAWN[view()]();
  performance.measure("draw", { start: started });
}

function showVerdict(grade, reason) {
  set($("verdict"), { class: `verdict ${grade}` });
  text($("grade"), grade);
  text($("why"), reason);
  const title = `${grade}: ${state?.deployment ?? "EPLB"}`;
  if (document.title !== title) document.title = title;
}

function showHeader() {
  text($("deployment"), state.deployment + (state.run === null ? "" :
    `: ${plural(state.num_layers, "MoE layer")} × ${plural(state.num_experts, "expert")} in ` +
    `${plural(state.num_slots, "slot")}, run ${state.run}`));
  figures($("facts"), [["generation", state.generation ?? "none"], ["step", count(state.step)]]);
  for (const [name, isOn, isGood] of [["movement", state.movement, state.movement],
    ["observe", state.observe, !state.observe]]) {
    text($(`${name}-on`), `${name} ${isOn ? "on" : "off"}`);
    set($(`${name}-on`), { class: isGood ? "good" : "bad" });
  }
  text($("movement"), state.movement ? "Pause movement" : "Resume movement");
}

function showAddress() {
  set($("main"), { "data-view": view() });
  for (const link of $("views").children) {
    set(link, { href: addressWith({ view: link.dataset.view }) });
    if (link.dataset.view === view()) set(link, { "aria-current": "page" });
    else link.removeAttribute("aria-current");
  }
  for (const button of $("ranges").children) {
    set(button, { "aria-pressed": Number(button.dataset.seconds) === range() });
  }
}

$("ranges").addEventListener("click", (event) => {
  if (event.target.dataset.seconds) location.hash = addressWith({ range: event.target.dataset.seconds });
});
$("deployments").addEventListener("change", () => location.assign($("deployments").value + location.hash));
addEventListener("hashchange", () => { showAddress(); historyDue = 0; refresh(); });
act(() => state);
new ResizeObserver(() => history && chart.draw(history)).observe($("chart"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => state && draw());
showAddress();
follow();
