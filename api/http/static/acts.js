// What the user may ask for: a plan, a proposal, a decision on one, a rebalance, a pause.

import { ask, refresh } from "/static/app.js";
import { $, element, text } from "/static/dom.js";
import { decideBy } from "/static/proposals.js";
import { decisionFigures, plural, size } from "/static/words.js";

export function send(method, path, body, more = {}) {
  const headers = { "Content-Type": "application/json", ...more };
  return ask(path, { method, headers, body: JSON.stringify(body) });
}

function reason(otherwise) {
  return $("reason").value.trim() || otherwise;
}

// Shows what `request` resolves to, or why it failed, in `host`.
export async function run(button, doing, request, host = $("answer")) {
  button.disabled = true;
  host.replaceChildren(element("p", { class: "quiet" }, doing));
  try {
    host.replaceChildren(...await request());
  } catch (error) {
    host.replaceChildren(element("p", { class: "bad" }, error.message));
  } finally {
    button.disabled = false;
    await refresh();
  }
}

async function rebalance(dryRun) {
  const why = reason(dryRun ? "dry run from the page" : "rebalance from the page");
  return planned(await send("POST", "rebalances", { dry_run: dryRun, reason: why }));
}

// What a plan would do, or does.
function planned(task) {
  if (task.state !== "done") return [unanswered(task)];
  const result = task.result;
  return [
    element("p", {}, element("span", { class: `tag ${result.decision}` }, result.decision ?? "done"),
      result.reason ?? ""),
    element("p", { class: "quiet" }, decisionFigures({
      imbalance_before: result.before, imbalance_after: result.after, moves: result.num_moves,
      bytes: bytesOf(result), policy: result.policy, generation: result.base_generation,
    })),
    ...(result.published ? [element("p", {}, `Published as plan ${result.plan_id}.`)] : []),
  ];
}

const bytesOf = (result) => Object.values(result.bytes_by_link ?? {}).reduce((sum, bytes) => sum + bytes, 0);

// To the placement before the one that serves; its price is asked for first, and shown.
async function rollback() {
  const { placements: [serving, before] } = await ask("placements?limit=2");
  if (before === undefined) throw new Error("no earlier placement is stored");
  const order = { generation: before.generation, reason: reason("rolled back from the page") };
  const same = { "If-Match": `"${serving.generation}"` };
  const price = await send("POST", "rollbacks", { ...order, dry_run: true }, same);
  if (price.state !== "done") return [unanswered(price)];
  const isWanted = await sure(`Generation ${serving.generation} goes back to the placement of generation ` +
    `${before.generation}: ${plural(price.result.num_moves, "move")}, ${size(bytesOf(price.result))}.`,
    `Roll back to generation ${before.generation}`);
  return isWanted ? planned(await send("POST", "rollbacks", { ...order, dry_run: false }, same)) :
    [element("p", { class: "quiet" }, "Nothing was rolled back.")];
}

// Asks once more; resolves to whether the answer is yes.
function sure(what, verb) {
  const dialog = $("sure");
  text($("sure-what"), what);
  text($("sure-yes"), verb);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((answer) => dialog.addEventListener("close",
    () => answer(dialog.returnValue === "yes"), { once: true }));
}

const unanswered = (task) => element("p", {}, `Task ${task.id} is ${task.state}: no answer of the controller yet.`);

async function propose() {
  const made = await send("POST", "proposals", { reason: reason("proposed on the page") });
  return [made.state === "open" ? element("p", {}, `Proposal ${made.id} waits for a decision.`) : unanswered(made)];
}

async function approve(one, acceptsLoss = false) {
  const why = { reason: reason("approved on the page"), accept_loss: acceptsLoss };
  let task;
  try {
    task = await send("POST", `proposals/${one.id}/approve`, why, { "If-Match": `"${one.base_generation}"` });
  } catch (error) {
    if (acceptsLoss || !error.type?.endsWith("/loses")) throw error;
    if (await sure(error.message, `Approve proposal ${one.id} all the same`)) return approve(one, true);
    return [element("p", { class: "quiet" }, "Nothing was approved.")];
  }
  if (task.state !== "done") return [unanswered(task)];
  return [element("p", {}, `Proposal ${one.id} is carried out by plan ${task.result.plan_id}.`)];
}

async function reject(one) {
  await send("POST", `proposals/${one.id}/reject`, { reason: reason("rejected on the page") });
  return [element("p", {}, `Proposal ${one.id} is rejected.`)];
}

const MEANING = {
  cordon: "It keeps its experts and takes no further ones.",
  drain: "The next plan moves every expert off it, whatever that costs in balance.",
  uncordon: "Plans may place experts on it again.",
};

// Cordons, drains or opens the rank of a line of GET /ranks.
export async function order(button, verb, { rank, experts, sole_experts: sole }) {
  const held = verb === "drain" ? ` It holds ${plural(experts, "expert")}, ${sole} of them alone.` : "";
  if (!await sure(`Rank ${rank}: ${MEANING[verb]}${held}`, `${verb[0].toUpperCase()}${verb.slice(1)} rank ${rank}`)) return;
  await run(button, "Changing the order.", async () => {
    const after = await send("POST", `ranks/${rank}/${verb}`, { reason: reason(`${verb} from the page`) });
    return [element("p", {}, `Rank ${rank} is ${after.ranks[rank].state}.${after.waits && ` It waits: ${after.waits}.`}`)];
  });
}

export function cancel(button, id) {
  return run(button, "Cancelling the request.", async () => {
    const task = await send("POST", `tasks/${id}/cancel`, { reason: reason("cancelled on the page") });
    return [element("p", {}, `Request ${task.id} is ${task.state}.`)];
  });
}

// Connects the buttons; `stateOf()` is the latest state.
export function act(stateOf) {
  $("dry-run").addEventListener("click", () =>
    run($("dry-run"), "Requesting a plan from the controller.", () => rebalance(true)));

  $("propose").addEventListener("click", () =>
    run($("propose"), "Requesting a proposal from the controller.", propose));

  $("rebalance").addEventListener("click", async () => {
    if (!await sure("The controller plans on the latest windows and publishes the migration if it is worth it. " +
      "A dry run shows what would move.", "Rebalance now")) return;
    await run($("rebalance"), "Requesting a migration from the controller.", () => rebalance(false));
  });

  $("rollback").addEventListener("click", () =>
    run($("rollback"), "Requesting the price from the controller.", rollback));

  decideBy({
    async approve(one, button) {
      if (!await sure(`Proposal ${one.id}: ${plural(one.moves, "move")}, ${size(one.bytes)}. ` +
        `It is published if generation ${one.base_generation} still serves.`, `Approve proposal ${one.id}`)) return;
      await run(button, "Requesting the migration from the controller.", () => approve(one));
    },
    reject: (one, button) => run(button, "Ending the proposal.", () => reject(one)),
  });

  $("movement").addEventListener("click", () => {
    const verb = stateOf()?.movement === false ? "resume" : "pause";
    run($("movement"), "Setting the switch.", async () => {
      const control = await send("POST", verb, { reason: reason(`${verb}d from the page`) });
      return [element("p", {}, `Movement is ${control.movement ? "on" : "off"}.`)];
    });
  });
}
