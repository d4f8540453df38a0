// What the user may ask for: a plan, a rebalance, a pause.

import { ask, refresh } from "/static/app.js";
import { $, element } from "/static/dom.js";
import { decisionFigures } from "/static/words.js";

function send(method, path, body) {
  const headers = { "Content-Type": "application/json" };
  return ask(path, { method, headers, body: JSON.stringify(body) });
}

function reason(otherwise) {
  return $("reason").value.trim() || otherwise;
}

async function run(button, doing, request) {
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

// Connects the buttons; `stateOf()` is the latest state.
export function act(stateOf) {
  $("dry-run").addEventListener("click", () =>
    run($("dry-run"), "Requesting a plan from the controller.", () => rebalance(true)));

  $("rebalance").addEventListener("click", () => $("sure").showModal());
  $("sure").addEventListener("close", () => {
    if ($("sure").returnValue !== "yes") return;
    $("sure").returnValue = "";
    run($("rebalance"), "Requesting a migration from the controller.", () => rebalance(false));
  });

  $("movement").addEventListener("click", () => {
    const verb = stateOf()?.movement === false ? "resume" : "pause";
    run($("movement"), "Setting the switch.", async () => {
      const control = await send("POST", verb, { reason: reason(`${verb}d from the page`) });
      return [element("p", {}, `Movement is ${control.movement ? "on" : "off"}.`)];
    });
  });
}
