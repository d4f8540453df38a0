// Pictures of figures: a line chart, two heatmaps. Each redraws whole; none keeps state.

const SVG = "http://www.w3.org/2000/svg";

export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  return filled(node, attributes, children);
}

function shape(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  // append() takes text as text, so nothing from the store can become markup.
  node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

function niceStep(range, most) {
  const rough = range / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 2.5, 5, 10].map((n) => n * power).find((step) => step >= rough);
}

// windows: scores in order of time; rebalances: marks. onPoint(score or null) follows the pointer.
export function drawChart(host, windows, rebalances, onPoint) {
  const shown = windows.filter((score) => score.is_complete && score.measured !== null);
  if (!shown.length) {
    host.replaceChildren(element("p", { class: "quiet" }, "No complete window of load yet."));
    return;
  }
  const width = host.clientWidth, height = host.clientHeight;
  const left = 38, right = 12, top = 18, bottom = 22;
  const values = shown.flatMap((score) => [score.measured, score.contiguous]);
  const highest = Math.max(1.1, ...values);
  const step = niceStep(highest - 1, 4);
  const most = 1 + step * Math.ceil((highest - 1) / step);
  const first = shown[0].first_step, last = shown.at(-1).last_step;
  const x = (at) => left + ((at - first) / Math.max(1, last - first)) * (width - left - right);
  const y = (value) => top + ((most - value) / (most - 1)) * (height - top - bottom);
  const label = `Imbalance of ${shown.length} windows, now ${shown.at(-1).measured.toFixed(2)}, ` +
    `unbalanced ${shown.at(-1).contiguous.toFixed(2)}, rebalances: ${rebalances.length}`;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });

  for (let value = 1; value <= most + 1e-9; value += step) {
    svg.append(
      shape("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      shape("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, value.toFixed(2)),
    );
  }
  const stepGap = niceStep(Math.max(1, last - first), Math.max(2, width / 130));
  for (let at = Math.ceil(first / stepGap) * stepGap; at <= last; at += stepGap) {
    // The first label names the unit; one that would touch the edge is left out.
    if (x(at) > width - 40 || stepGap < 1) continue;
    svg.append(shape("text", { x: x(at), y: height - 6, "text-anchor": "middle" },
      x(at) < left + 60 ? `step ${at}` : at));
  }
  let labelEnd = -Infinity;
  for (const mark of rebalances) {
    if (mark.step === null || mark.step < first || mark.step > last) continue;
    const at = x(mark.step);
    const line = shape("line", { class: "mark", x1: at, x2: at, y1: top, y2: height - bottom });
    line.append(shape("title", {}, `generation ${mark.generation}: ${mark.reason}`));
    svg.append(line);
    if (at < labelEnd + 6) continue;
    const name = `g${mark.generation}`;
    svg.append(shape("text", { class: "mark-label", x: at, y: top - 6, "text-anchor": "middle" },
      name));
    labelEnd = at + 7 * name.length;
  }
  for (const kind of ["contiguous", "measured"]) {
    const points = shown.map((score) => `${x(score.last_step).toFixed(1)},${y(score[kind]).toFixed(1)}`);
    svg.append(shape("polyline", { class: kind, points: points.join(" ") }));
  }
  const now = shown.at(-1);
  svg.append(shape("circle", { class: "last", cx: x(now.last_step), cy: y(now.measured), r: 3.5 }));
  const cursor = shape("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  svg.append(cursor);
  svg.addEventListener("pointermove", (event) => {
    const at = event.clientX - svg.getBoundingClientRect().left;
    const near = shown.reduce((best, score) =>
      Math.abs(x(score.last_step) - at) < Math.abs(x(best.last_step) - at) ? score : best);
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(near.last_step));
    cursor.setAttribute("visibility", "visible");
    onPoint(near);
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    onPoint(null);
  });
  host.replaceChildren(svg);
}

// Half the mean and less is all cold, one and a half times the mean and more all hot.
function rankColour(ratio) {
  const part = Math.min(1, Math.abs(ratio - 1) / 0.5);
  return `color-mix(in oklab, var(${ratio > 1 ? "--hot" : "--cold"}) ${Math.round(part * 85)}%, var(--surface))`;
}

// rows [layers][ranks] of rank load over mean; layerIds are the model's own numbers.
export function drawRankTable(host, rows, layerIds, nodeOfRank, silent) {
  const numRanks = rows[0].length;
  const withNumbers = numRanks <= 16;
  const nodes = element("tr", {}, element("th", { class: "corner" }));
  for (let rank = 0; rank < numRanks;) {
    let end = rank;
    while (end < numRanks && nodeOfRank[end] === nodeOfRank[rank]) end += 1;
    nodes.append(element("th", { class: "node", colspan: end - rank, scope: "colgroup" },
      `node ${nodeOfRank[rank]}`));
    rank = end;
  }
  const ranks = element("tr", {}, element("th", { scope: "col", class: "corner" }, "layer \\ rank"));
  for (let rank = 0; rank < numRanks; rank += 1) {
    const isSilent = silent.includes(rank);
    ranks.append(element("th", { scope: "col", class: isSilent ? "silent" : "",
      "aria-label": `rank ${rank}${isSilent ? ", silent" : ""}` }, isSilent ? `${rank} !` : rank));
  }
  const body = element("tbody");
  rows.forEach((row, at) => {
    const layer = layerIds[at];
    const line = element("tr", {}, element("th", { scope: "row" }, layer));
    row.forEach((ratio, rank) => {
      const cell = element("td", { title: ratio === null ? `layer ${layer}: no tokens` :
        `layer ${layer}, rank ${rank}: ${ratio.toFixed(3)} × mean` },
        !withNumbers ? "" : ratio === null ? "–" : ratio.toFixed(2));
      if (ratio !== null) cell.style.background = rankColour(ratio);
      line.append(cell);
    });
    body.append(line);
  });
  const caption = nodeOfRank.at(-1) > 0 ? [nodes, ranks] : [ranks];
  host.replaceChildren(element("table", withNumbers ? {} : { class: "dense" },
    element("thead", {}, ...caption), body));
}

// rows [layers][experts] of expert load over mean; one pixel each, scaled up by the style sheet.
export function drawExpertCanvas(canvas, rows) {
  const style = getComputedStyle(document.documentElement);
  const [from, to] = ["--surface", "--accent"].map((name) => rgb(style.getPropertyValue(name)));
  canvas.width = rows[0].length;
  canvas.height = rows.length;
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  rows.flat().forEach((ratio, at) => {
    const part = Math.min(1, ratio / 4);
    for (let c = 0; c < 3; c += 1) image.data[4 * at + c] = from[c] + (to[c] - from[c]) * part;
    image.data[4 * at + 3] = 255;
  });
  context.putImageData(image, 0, 0);
}

function rgb(hex) {
  const digits = hex.trim().slice(1);
  return [0, 2, 4].map((at) => parseInt(digits.slice(at, at + 2), 16));
}
