// Load as colours: a table with numbers for few ranks, a canvas for many and for experts.

import { element, keyed, set, show, text } from "/static/dom.js";

const SHADES = 200;
const MOST_NUMBERS = 16;  // ranks whose numbers fit beside each other

// Half the mean and less is all cold, one and a half times the mean and more all hot.
function rankColour(ratio) {
  const part = Math.min(1, Math.abs(ratio - 1) / 0.5);
  return `color-mix(in oklab, var(${ratio > 1 ? "--hot" : "--cold"}) ${Math.round(part * 85)}%, var(--surface))`;
}

// rows [layers][ranks] of rank load over mean, null for a layer without tokens and for a rank that
// does not serve; layerIds are the model's own numbers.
export function drawRanks(hosts, rows, layerIds, nodeOfRank, silent) {
  const isTable = nodeOfRank.length <= MOST_NUMBERS;
  show(hosts.table, isTable);
  show(hosts.picture, !isTable);
  if (isTable) drawTable(hosts.table, rows, layerIds, nodeOfRank, silent);
  else drawPicture(hosts, rows, layerIds, nodeOfRank, silent);
}

function drawTable(host, rows, layerIds, nodeOfRank, silent) {
  const shape = `${layerIds}/${nodeOfRank}`;
  if (host.dataset.shape !== shape) {
    host.replaceChildren(emptyTable(layerIds, nodeOfRank));
    host.dataset.shape = shape;
  }
  const [head, body] = host.firstChild.children;
  nodeOfRank.forEach((_, rank) => {
    const isSilent = silent.includes(rank), cell = head.lastChild.children[rank + 1];
    set(cell, { class: isSilent ? "silent" : "", "aria-label": `rank ${rank}${isSilent ? ", silent" : ""}` });
    text(cell, isSilent ? `${rank} !` : rank);
  });
  rows.forEach((row, at) => nodeOfRank.forEach((_, rank) => {
    const cell = body.children[at].children[rank + 1], ratio = row === null ? null : row[rank];
    text(cell, ratio === null ? "–" : ratio.toFixed(2));
    set(cell, { title: ratio === null ? `layer ${layerIds[at]}: no tokens` :
      `layer ${layerIds[at]}, rank ${rank}: ${ratio.toFixed(3)} × mean` });
    cell.style.background = ratio === null ? "" : rankColour(ratio);
  }));
}

function emptyTable(layerIds, nodeOfRank) {
  const nodes = element("tr", {}, element("th", { class: "corner" }));
  for (let rank = 0; rank < nodeOfRank.length;) {
    let end = rank;
    while (end < nodeOfRank.length && nodeOfRank[end] === nodeOfRank[rank]) end += 1;
    nodes.append(element("th", { class: "node", colspan: end - rank, scope: "colgroup" }, `node ${nodeOfRank[rank]}`));
    rank = end;
  }
  const ranks = element("tr", {}, element("th", { scope: "col", class: "corner" }, "layer \\ rank"),
    ...nodeOfRank.map(() => element("th", { scope: "col" })));
  const body = element("tbody", {}, ...layerIds.map((layer) => element("tr", {},
    element("th", { scope: "row" }, layer), ...nodeOfRank.map(() => element("td")))));
  return element("table", {}, element("thead", {}, ...(nodeOfRank.at(-1) > 0 ? [nodes, ranks] : [ranks])), body);
}

function drawPicture(hosts, rows, layerIds, nodeOfRank, silent) {
  const [cold, surface, hot] = colours("--cold", "--surface", "--hot");
  paint(hosts.canvas, rows, nodeOfRank.length, 2, (ratio) =>
    mix(surface, ratio > 1 ? hot : cold, Math.min(1, Math.abs(ratio - 1) / 0.5)));
  hosts.canvas.describe = (layer, rank) => `layer ${layerIds[layer]}, rank ${rank} on node ${nodeOfRank[rank]}` +
    `${silent.includes(rank) ? ", silent" : ""}: ` +
    (rows[layer]?.[rank] == null ? "no tokens" : `${rows[layer][rank].toFixed(3)} × mean`);
  drawAxis(hosts.layers, "layer", layerIds);
  drawAxis(hosts.ranks, "rank", [...nodeOfRank.keys()]);
  keyed(hosts.silent, silent, (rank) => rank, () => element("i"), (mark, rank) => {
    mark.style.setProperty("--at", `${(100 * (rank + 0.5)) / nodeOfRank.length}%`);
  });
}

// rows [layers][experts] of expert load over mean.
export function drawExperts(hosts, rows, layerIds, numExperts) {
  const [from, to] = colours("--surface", "--accent");
  paint(hosts.canvas, rows, numExperts, 4, (ratio) => mix(from, to, Math.min(1, ratio / 4)));
  hosts.canvas.describe = (layer, expert) => `layer ${layerIds[layer]}, expert ${expert}: ` +
    (rows[layer] === null ? "no tokens" : `${rows[layer][expert].toFixed(3)} × mean`);
  drawAxis(hosts.layers, "layer", layerIds);
  drawAxis(hosts.numbers, "expert", [...Array(numExperts).keys()]);
}

// One pixel for each figure, scaled up by the style sheet. A layer without tokens stays clear.
// Ratios from 0 to `most` have one of SHADES colours, made once for all cells.
function paint(canvas, rows, numColumns, most, colourOf) {
  const shades = Uint32Array.from({ length: SHADES + 1 }, (_, at) => {
    const [red, green, blue] = colourOf((most * at) / SHADES).map(Math.round);
    return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
  });
  if (canvas.width !== numColumns) canvas.width = numColumns;
  if (canvas.height !== rows.length) canvas.height = rows.length;
  const context = canvas.getContext("2d");
  const image = context.createImageData(numColumns, rows.length);
  const pixels = new Uint32Array(image.data.buffer), scale = SHADES / most;
  for (let at = 0; at < rows.length; at += 1) {
    const row = rows[at], start = at * numColumns;
    if (row === null) continue;
    for (let column = 0; column < numColumns; column += 1) {
      if (row[column] !== null) pixels[start + column] = shades[Math.min(SHADES, Math.round(row[column] * scale))];
    }
  }
  context.putImageData(image, 0, 0);
}

// The cell under the pointer, or the one that arrow keys lead to, in words.
export function readOut(canvas, host) {
  let at = [0, 0];
  const read = (row, column) => {
    at = [Math.max(0, Math.min(canvas.height - 1, row)), Math.max(0, Math.min(canvas.width - 1, column))];
    text(host, canvas.describe?.(...at) ?? "");
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    read(Math.floor(((event.clientY - box.top) / box.height) * canvas.height),
      Math.floor(((event.clientX - box.left) / box.width) * canvas.width));
  });
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    read(at[0] + by[0], at[1] + by[1]);
  });
  for (const end of ["pointerleave", "blur"]) canvas.addEventListener(end, () => text(host, ""));
}

// At most eight of the names, each beside the middle of its row or column.
function drawAxis(host, title, names) {
  const shape = `${title}/${names.length}/${names[0]}`;
  if (host.dataset.shape === shape) return;
  host.dataset.shape = shape;
  const gap = Math.ceil(names.length / 8);
  const ticks = names.map((name, at) => [name, at]).filter(([, at]) => at % gap === 0);
  host.replaceChildren(element("b", {}, title), ...ticks.map(([name, at]) => {
    const tick = element("span", {}, name);
    tick.style.setProperty("--at", `${(100 * (at + 0.5)) / names.length}%`);
    return tick;
  }));
}

const mix = (from, to, part) => from.map((value, c) => value + (to[c] - value) * part);

function colours(...names) {
  const style = getComputedStyle(document.documentElement);
  return names.map((name) => {
    const digits = style.getPropertyValue(name).trim().slice(1);
    return [0, 2, 4].map((at) => parseInt(digits.slice(at, at + 2), 16));
  });
}
