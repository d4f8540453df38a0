// The latest window: load of ranks and experts, the worst layers, and why an expert is where it is.

import { run, send } from "/static/acts.js";
import { $, element, keyed, text } from "/static/dom.js";
import { drawExperts, drawRanks, readOut } from "/static/heat.js";
import { ABSENT } from "/static/words.js";

const LAYERS_SHOWN = 10, FROZEN_SHOWN = 3;

export function showLoad(state, heat) {
  if (heat?.window == null || heat.run !== state.run) return;
  const hosts = { table: $("heatmap"), picture: $("rank-picture"), canvas: $("ranks"),
    layers: $("rank-layers"), ranks: $("rank-numbers"), silent: $("rank-silent") };
  // A rank that does not serve has no load: in colours, none would look like a rank without work.
  const serving = heat.ranks.map((row) => row?.map((ratio, rank) =>
    (ABSENT.includes(state.ranks[rank].phase) ? null : ratio)) ?? null);
  drawRanks(hosts, serving, state.layer_ids, state.node_of_rank, state.silent_ranks);
  drawExperts({ canvas: $("experts"), layers: $("experts-layers"), numbers: $("experts-numbers") },
    heat.experts, state.layer_ids, state.num_experts);
  const worst = worstLayers(state, heat), cordoned = state.ranks.filter((rank) => rank.cordon).length;
  text($("heat-note"), ["Latest window.",
    worst.length ? `Worst: layer ${worst[0].layer}, rank ${worst[0].rank} with ${worst[0].ratio.toFixed(2)} × mean.` : "No layer has tokens.",
    cordoned ? `Cordoned or drained: ${cordoned}, see Ranks.` : "",
    ...state.ranks.filter((rank) => rank.frozen).slice(0, FROZEN_SHOWN)
      .map((rank) => `Migrations are disabled on rank ${rank.rank}: ${rank.frozen}.`)].join(" "));
  const hottest = worst.reduce((most, one) => Math.max(most, one.heat), 0);
  text($("experts-note"), `Same window; the hottest expert has ${hottest.toFixed(1)} × the mean of its layer.`);
  keyed($("worst"), worst.slice(0, LAYERS_SHOWN), (one) => one.layer, made, (node, one) => {
    const values = [one.ratio.toFixed(2), one.rank, `${one.expert} (${one.heat.toFixed(1)} ×)`];
    values.forEach((value, at) => text(node.children[at + 1], value));
    node.shown = one;
  });
}

// One for each layer with tokens, the worst first.
function worstLayers(state, heat) {
  return heat.ranks.flatMap((row, at) => {
    if (row === null) return [];
    const [ratio, rank] = largest(row), [most, expert] = largest(heat.experts[at]);
    return [{ layer: state.layer_ids[at], ratio, rank, heat: most, expert }];
  }).sort((a, b) => b.ratio - a.ratio);
}

function largest(values) {
  let at = 0;
  for (let next = 1; next < values.length; next += 1) if (values[next] > values[at]) at = next;
  return [values[at], at];
}

function made({ layer }) {
  const button = element("button", { type: "button", "aria-label": `Explain the hottest expert of layer ${layer}` }, "Explain");
  const line = element("tr", {}, element("th", { scope: "row" }, layer), ...[0, 1, 2].map(() => element("td")),
    element("td", { class: "orders" }, button));
  button.addEventListener("click", () => {
    const { expert } = line.shown;
    run(button, "Requesting a plan from the controller.", () => explain(layer, expert), $("explained"));
  });
  return line;
}

async function explain(layer, expert) {
  const task = await send("POST", "explanations", { layer, expert });
  const title = element("h3", {}, `Layer ${layer}, expert ${expert}`);
  if (task.state !== "done") return [title, element("p", {}, `Task ${task.id} is ${task.state}: no answer of the controller yet.`)];
  return [title, element("ul", {}, ...task.result.sentences.map((one) => element("li", {}, one)))];
}

readOut($("ranks"), $("rank-readout"));
readOut($("experts"), $("expert-readout"));
